"""Record finished exchanges in the capture: the meter's loop queues them, a thread writes them to disk.

`Recorder` is a sink of the pipeline. It adds block hashes, session and redacted text (`capture/privacy`) as
far as the level allows, and stores the relays' counts; `capture/store` makes the files. The memory of waiting
exchanges is bounded: above the bound, exchanges are measured but not captured, and counted by reason. An
exchange is on the disk (in the spool) at most `capture.flush` and one turn of the thread (0.6 s by default)
after its end. If the disk accepts no writes, it waits in memory, and writing is tried again.
"""

import logging
import os
import secrets
import threading
from collections import deque
from dataclasses import fields
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.capture.options import CaptureOptions, redact_url
from llmtap.capture.privacy.redaction import Redactor
from llmtap.capture.privacy.sessions import BlockHasher, ConversationKeys, Sessions
from llmtap.capture.privacy.text_blocks import text_block_hashes
from llmtap.capture.schema import CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.rows import to_batch
from llmtap.capture.store.spool import aside_options, remove_empty_folder
from llmtap.capture.store.store import Store, StoreState, spool_folder
from llmtap.capture.tokenizer import Encode
from llmtap.clock import Clock
from llmtap.errors import LlmtapError
from llmtap.exchange.bounds import memory_bytes
from llmtap.exchange.exchange import CapturedText, Exchange
from llmtap.exchange.prompt import read_prompt
from llmtap.export.sinks import CaptureState, SeriesKey
from llmtap.meter.pipeline.capture_pause import PauseWatch
from llmtap.metrics.latency import Measured
from llmtap.protocol.http1 import Headers, RequestHead

ROWS_MAX: Final = 1_000
"""Number of queued rows at which the queue is written at once."""
TURN_S: Final = 0.1
"""Interval at which the thread works; a wake-up for each exchange would cost more CPU time than its work."""
LEFT_MAX: Final = 64
"""Maximum number of disconnected relays whose counts each later file repeats, so that readers notice a lost
file. Without the limit, apps with the middleware that start and end would add relays without end."""
_STORE_FIELDS: Final = {one.name for one in fields(StoreState)} & {one.name for one in fields(CaptureState)}
RETRY_OPEN_NS: Final = 1_000_000_000
STEP_ASIDE_S: Final = 4.0
"""Time limit for finishing the files before the folder is released. Exchanges wait in memory meanwhile."""

log = logging.getLogger(__name__)


class _RequestMemory:
    """Total size of request data that wait for the end of their exchange, counted by both threads."""

    def __init__(self) -> None:
        self.n_bytes = 0
        """Present total size."""
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self.n_bytes += n


class _RequestData:
    """Data of a request that the recorder needs at the end of its exchange (`Exchange.capture_data`)."""

    __slots__ = ("_counted_bytes", "_memory", "body", "keys")

    def __init__(self, memory: _RequestMemory, body: bytes | None = None) -> None:
        self.body = body
        """Body of the request; None if the capture stores no text of it."""
        self.keys: ConversationKeys | None = None
        """Keys by which the conversation of the request is found."""
        self._memory = memory
        self._counted_bytes = 0
        """Bytes of this request that `_memory` has counted, to be subtracted by `release`."""

    def count_memory(self, x: Exchange) -> None:
        """Count the body, the shape of the request and the keys of its conversation."""
        n_bytes = len(self.body or b"") + memory_bytes(self.keys) + memory_bytes(x.shape)
        self._memory.add(n_bytes - self._counted_bytes)
        self._counted_bytes = n_bytes

    def release(self) -> None:
        self._memory.add(-self._counted_bytes)
        self._counted_bytes = 0

    def __del__(self) -> None:
        self.release()


class Recorder:
    """Recorder of one capture.

    Args:
        info: metadata of its files.
        salt: key of all hashes; it is written nowhere.
        after: number (NUMBER in the name) of the latest relay that was started before the capture; 0: none.
        encode: the configured tokenizer, or None.
        waits: whether to wait for the folder, because another recorder still has it and will release it soon.
    """

    def __init__(
        self,
        options: CaptureOptions,
        clock: Clock,
        info: CaptureInfo,
        *,
        salt: bytes,
        after: int = 0,
        encode: Encode | None = None,
        waits: bool = False,
    ) -> None:
        self._options = options
        self._clock = clock
        self._info = info
        self._salt = salt
        """Secret key of all hashes of the capture, so that a text cannot be guessed from its hash."""
        self._store = Store(options, info, clock, continues=waits and not after)
        self._hasher: BlockHasher | None = None
        if options.level != "none":
            size = info.block_size
            self._hasher = BlockHasher(
                salt, block_size=size, unit="bytes" if encode is None else "tokens", tokenize=encode
            )
        self._sessions = Sessions(
            salt,
            hash_names=options.level != "none",
            headers=options.session_headers,
            fields=options.session_fields,
            parents=options.parent_headers,
        )
        """Finds the conversation of each exchange."""
        names = (*options.session_headers, *options.parent_headers)
        self._session_fields = frozenset(name.lower().encode() for name in names)
        """Header fields that the recorder needs to find conversations."""
        self._redactor = Redactor(options.redact) if options.level == "full" else None
        # The event loop appends entries, the thread removes them. Entry of a complete request: (exchange,
        # session header fields, body, counted bytes). Entry of a finished exchange: (exchange, None, b"",
        # counted bytes).
        self._inbox: deque[tuple[Exchange, Headers | None, bytes, int]] = deque()
        """For the thread: ended exchanges, or requests with head and body; and their sizes in bytes."""
        self._appended_bytes = 0  # total of bytes appended, counted by the loop
        self._removed_bytes = 0  # total of bytes removed, counted by the thread
        self._request_memory = _RequestMemory()
        self._rows: list[Exchange] = []
        """Exchanges that are to be encoded as the next batch."""
        self._row_bytes = 0
        """Estimated memory of `_rows`."""
        self._oldest_row_ns = 0
        """Time at which the oldest of `_rows` was added: rows are written after `flush` at the latest."""
        self._empty_batch = to_batch([], capture=info.capture, level=options.level)[0]
        """Batch without rows, with which counts are written when there is no row."""
        self._batches: deque[Any] = deque()
        """Encoded batches that are not written yet."""
        self._batch_bytes = 0
        self._batch_rows = 0
        self._captured_rows = 0
        """Number of rows that were written."""
        self._dropped_by_reason: dict[str, int] = {}
        """By reason: number of exchanges that were lost."""
        self._left_out_by_reason: dict[str, int] = {}
        """By reason: number of exchanges that get no row on purpose."""
        self._unread_requests = 0  # requests not read because the memory was full; counted by the loop
        self._cut_prompts = 0  # prompts too large to be read as a whole; counted by the thread
        self._errors: dict[str, int] = {}
        """By type of exception: number of failures in the thread."""
        self._relays: dict[str, RelayCount] = {}
        """By name: counts of a relay, for the balance of requests and rows in the capture."""
        self._left_relays: dict[str, None] = {}
        """Names of disconnected relays whose counts are kept, the oldest first; used as an ordered set."""
        self._owes_counts = False  # whether to write counts again: the latest include running exchanges
        self._after_relay = after
        """Relays up to this number were started before the capture, so their earlier counts are
        subtracted."""
        self._meter_id = secrets.token_hex(4)
        """Random identifier of this meter, by which a reader tells its counts from those of others."""
        self._is_complete = False
        """Whether all relays reported their final counts, so readers expect no more rows."""
        self._is_open = False
        """Whether `_store` could open its folder."""
        self._next_open_ns = 0
        """Earliest time of the next attempt to open the folder."""
        self._waits_for_folder = waits
        """Whether another meter still has the folder, so that failures to open it are no errors."""
        self._must_step_aside = False
        """Whether to release the folder to another recorder, and use a folder next to it."""
        self._flushes_requested = 0  # number since the start, counted by the loop
        self._flushes_done = 0  # number since the start, counted by the thread
        self._aside_folder: Path | None = None
        """Folder next to the configured one; None: the configured one is used."""
        self._pause_watch = PauseWatch(
            options.memory_bytes, str(spool_folder(options)), redact_url(options.to or "")
        )
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Open the folder, and start the thread."""
        self._open()
        self._thread.start()

    def observe_request(self, x: Exchange, head: RequestHead, body: bytes) -> bool:
        """Queue a complete request. Return whether the texts of its answer are needed."""
        full = self._redactor is not None and self._captures_text(x.tenant)
        wants_text = full or self._options.pair_key is not None
        if self._pending_bytes + len(body) > self._options.memory_bytes:
            self._unread_requests += 1
            return False
        self._appended_bytes += len(body)
        # Store only these header fields, so that the queue contains no keys and cookies.
        headers = [field for field in head.headers if field[0].lower() in self._session_fields]
        self._inbox.append((x, headers, body, len(body)))
        return wants_text

    def on_end(self, x: Exchange, m: Measured, key: SeriesKey, met: bool | None) -> None:
        """Queue a finished exchange for the thread; drop it if the memory is full."""
        n_bytes = _bytes_of(x)
        if self._pending_bytes + n_bytes > self._options.memory_bytes:
            self._drop(self._store.problem or "memory", 1)
            x.shape = x.text = x.capture_data = None
            return
        self._appended_bytes += n_bytes
        self._inbox.append((x, None, b"", n_bytes))

    def leave_out(self, reason: str) -> None:
        """Count an exchange that gets no row, because it is not model traffic. Readers then miss no row."""
        self._left_out_by_reason[reason] = self._left_out_by_reason.get(reason, 0) + 1

    def note_relay(
        self,
        relay: str,
        opened: int,
        dropped: dict[str, int],
        unsettled: int,
        packets: dict[str, int] | None = None,
        watched: dict[str, int] | None = None,
    ) -> None:
        """Store the counts of a relay, by which a reader of the capture can find missing rows."""
        known = self._relays.get(relay)
        if known is not None:
            since, before = known.since, known.before
        elif 0 < _relay_number(relay) <= self._after_relay:
            since, before = opened, dict(dropped)
        else:
            since, before = 0, {}
        if packets is None and known is not None:
            packets, watched = known.packets, known.watched
        count = RelayCount(
            opened, dict(dropped), unsettled, since, before, dict(packets or {}), dict(watched or {})
        )
        self._relays = {**self._relays, relay: count}
        self._left_relays.pop(relay, None)

    def note_relay_left(self, relay: str, opened: int, dropped: dict[str, int]) -> None:
        """Store the last counts of a relay that disconnected and has no open exchanges.

        If there are more than LEFT_MAX such relays, the oldest are forgotten as soon as a file has their
        final counts: readers use the latest counts of each relay from all files.
        """
        self.note_relay(relay, opened, dropped, 0)
        if 0 < _relay_number(relay) <= self._after_relay:
            return  # keep a relay from before the capture: if it were forgotten, it would later count as new
        self._left_relays[relay] = None
        reported = self._store.ledger().relays
        first = list(self._left_relays)[: max(0, len(self._left_relays) - LEFT_MAX)]
        gone = {name for name in first if reported.get(name) == self._relays[name]}
        if gone:
            self._relays = {name: count for name, count in self._relays.items() if name not in gone}
            self._left_relays = dict.fromkeys(name for name in self._left_relays if name not in gone)

    def state(self) -> CaptureState:
        """Return the state of the capture for the admin API."""
        store = self._store.state()
        deleted = {"deleted": store.rows_deleted} if store.rows_deleted else {}
        skipped = 0 if self._hasher is None else self._hasher.skipped_prompts
        return CaptureState(
            to=redact_url(self._options.to or ""),
            level=self._options.level,
            exchanges=self._captured_rows,
            waiting=self._waiting,
            dropped={**self._dropped_by_reason, **deleted},
            unshaped=self._unread_requests + self._cut_prompts + skipped,
            pause=self._pause_watch.pause,
            **{name: getattr(store, name) for name in _STORE_FIELDS}
            | ({} if self._is_open else {"problem": "folder"}),
        )

    def set_config(self, config: str) -> None:
        """Write this fingerprint of the configuration into the metadata of files that begin from now on."""
        self._info = msgspec.structs.replace(self._info, config=config)
        self._store.info = self._info

    def flush(self) -> None:
        """Request that files are made of all exchanges so far; `is_flushing` reports the progress."""
        self._flushes_requested += 1

    @property
    def is_flushing(self) -> bool:
        return self._flushes_done < self._flushes_requested or self._store.state().files_waiting > 0

    def give_way(self) -> None:
        """Release the folder to another recorder; write later exchanges to a second folder next to it."""
        self._must_step_aside = True

    def close(self, timeout_s: float, *, whole: bool = False) -> None:
        """Write waiting rows, and finish the files within `timeout_s`; the next start recovers all others.

        `whole`: whether the relays reported their final counts and the capture will get no more exchanges.
        """
        self._is_complete = whole
        end_ns = self._clock.mono_ns() + round(timeout_s * 1e9)
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        left = self._waiting
        if left:
            hint = "the disk was too slow to store them before the meter had to end"
            log.error("event=capture_closed_early exchanges_lost=%d hint=%r", left, hint)
        if self._is_open:
            self._store.close(max(0.0, (end_ns - self._clock.mono_ns()) / 1e9))
        if self._aside_folder is not None:
            remove_empty_folder(self._aside_folder)

    @property
    def _waiting(self) -> int:
        return len(self._inbox) + len(self._rows) + self._batch_rows

    @property
    def _pending_bytes(self) -> int:
        queued_bytes = self._appended_bytes - self._removed_bytes
        return queued_bytes + self._row_bytes + self._batch_bytes + self._request_memory.n_bytes

    def _captures_text(self, tenant: str) -> bool:
        """Return whether the tenant's text is captured."""
        return any(fnmatchcase(tenant, pattern) for pattern in self._options.full_tenants)

    def _drop(self, reason: str, n: int) -> None:
        """Count rows that are not captured."""
        self._dropped_by_reason[reason] = self._dropped_by_reason.get(reason, 0) + n

    def _run(self) -> None:
        while not self._stop_event.wait(TURN_S):
            self._run_turn()
        self._next_open_ns = 0  # if the folder could not be opened, try again now
        self._run_turn(last=True)

    def _run_turn(self, *, last: bool = False) -> None:
        """Process the waiting exchanges, and write rows that are due. `last`: write all of them."""
        requested = self._flushes_requested
        flush = requested > self._flushes_done
        try:
            self._process_inbox()
            due_ns = self._oldest_row_ns + self._options.flush
            if self._rows and (last or flush or self._clock.mono_ns() >= due_ns):
                self._encode()
            if self._must_step_aside:
                self._step_aside()
            if self._is_open or self._open():
                self._write()
                if last:
                    self._give_up()
                    self._store.append(self._empty_batch, self._make_ledger(closed=self._is_complete))
                if flush:
                    self._store.rotate()
                    self._flushes_done = requested
                self._store.tick()
        except Exception as error:  # an error of the capture must not affect the measurement
            self._count_error(error)
        self._pause_watch.update(
            self._store.problem if self._is_open else "folder",
            self._clock.mono_ns(),
            rows=self._waiting,
            n_bytes=self._pending_bytes,
            dropped=sum(self._dropped_by_reason.values()),
        )

    def _step_aside(self) -> None:
        """Make files of the spools, and release the folder; later exchanges go to a second folder, next to
        it. Spools that are not finished within STEP_ASIDE_S are finished when the process ends."""
        self._must_step_aside = False
        if self._is_open:
            self._store.append(self._empty_batch, self._make_ledger())
            self._store.close(STEP_ASIDE_S)
        options = aside_options(self._options, spool_folder(self._options), os.getpid())
        self._store = Store(options, self._info, self._clock)
        self._aside_folder = spool_folder(options)
        self._next_open_ns = 0
        self._is_open = False
        self._open()

    def _open(self) -> bool:
        """Open the capture; after a failure, only some time later. Return whether it is open."""
        now_ns = self._clock.mono_ns()
        if now_ns < self._next_open_ns:
            return False
        try:
            self._store.open()
        except LlmtapError as exc:
            if not self._next_open_ns and not self._waits_for_folder:
                hint = "exchanges wait in memory; llmtap tries again every second"
                log.error("event=capture_not_opened error=%r hint=%r", str(exc), hint)
            self._next_open_ns = now_ns + RETRY_OPEN_NS
            return False
        self._is_open = True
        return True

    def _process_inbox(self) -> None:
        """Process all requests and exchanges that arrived since the latest turn."""
        for _ in range(len(self._inbox)):
            x, headers, body, n_bytes = self._inbox.popleft()
            self._removed_bytes += n_bytes
            try:
                if headers is not None:
                    self._read_request(x, headers, body)
                else:
                    self._finish_exchange(x)
            except Exception as error:
                self._count_error(error)
                x.text = None  # discard the text: the error possibly prevented its redaction
            if headers is not None:
                continue
            if not self._rows:
                self._oldest_row_ns = self._clock.mono_ns()
            self._row_bytes += _bytes_of(x)
            self._rows.append(x)
            if len(self._rows) >= ROWS_MAX:
                self._encode()

    def _read_request(self, x: Exchange, headers: Headers, body: bytes) -> None:
        """Read the shape of a request's prompt, and redact its text if the capture has texts."""
        full = self._redactor is not None and self._captures_text(x.tenant)
        x.capture_data = data = _RequestData(self._request_memory, body if full else None)
        data.count_memory(x)
        if self._pending_bytes > self._options.memory_bytes:
            self._cut_prompts += 1  # do not read it: a shape can take ten times the memory of its body
            return
        prompt = read_prompt(body, x.endpoint)
        if prompt is not None:
            x.shape = prompt.shape
            self._cut_prompts += prompt.cut
            hasher = self._hasher
            blocks = None if hasher is None else hasher.blocks(prompt)
            if hasher is not None and blocks is not None:
                x.shape.blocks, x.shape.tokens = blocks
                x.shape.block_size, x.shape.block_unit = hasher.block_size, hasher.unit
        data.keys = self._sessions.request_keys(headers, prompt)
        data.count_memory(x)

    def _finish_exchange(self, x: Exchange) -> None:
        """Add the data of the request to its finished exchange."""
        data, x.capture_data = x.capture_data, None
        if not isinstance(data, _RequestData):
            x.text = None
            return
        if data.keys is not None:
            x.turn = self._sessions.turn(x, data.keys)
        text, x.text = x.text, None
        if self._options.pair_key is not None and text is not None:
            x.text_blocks = text_block_hashes(text.response_text or "", self._salt)
        if data.body is not None and self._is_sampled(x):
            x.text = self._redact(data.body, text)
        data.release()

    def _is_sampled(self, x: Exchange) -> bool:
        """Return whether the exchange's conversation is in the sample of captured ones."""
        unit = x.id if x.turn is None else x.turn.session
        digest = blake2b(unit.encode(), key=self._salt, digest_size=8).digest()
        return int.from_bytes(digest) < self._options.full_share * (1 << 64)

    def _redact(self, body: bytes, captured: CapturedText | None) -> CapturedText:
        assert self._redactor is not None
        request, n = self._redactor.body(body)
        out = CapturedText(request_body=request, redactions=n)
        if captured is not None and captured.response_text is not None:
            out.response_text, more = self._redactor.text(captured.response_text)
            out.redactions += more
        return out

    def _encode(self) -> None:
        """Make a batch of the rows."""
        rows, self._rows = self._rows, []
        self._row_bytes = 0
        batch, failed = to_batch(rows, capture=self._info.capture, level=self._options.level)
        for x in rows:
            x.shape = x.turn = x.text = x.text_blocks = None  # free memory: `RecentExchanges` needs none
            del x.timeline.events.chars[:]
        for error in failed:
            self._count_error(error)
        if failed:
            self._drop("error", len(failed))
        if batch.num_rows:
            self._batches.append(batch)
            self._batch_bytes += batch.nbytes
            self._batch_rows += batch.num_rows

    def _write(self) -> None:
        """Append the batches to the capture; keep the rest if this fails."""
        ledger = self._make_ledger()
        while self._batches:
            batch = self._batches[0]
            if not self._store.append(batch, ledger):
                return  # retry the same batch in the next turn; `memory_bytes` limits the waiting rows
            self._batches.popleft()
            self._batch_bytes -= batch.nbytes
            self._batch_rows -= batch.num_rows
            self._captured_rows += batch.num_rows
            self._owes_counts = not _is_settled(ledger)
        if self._owes_counts and _is_settled(ledger) and not self._rows and not self._inbox:
            # Without traffic, no row carries these counts into a file: write a batch without rows.
            self._owes_counts = not self._store.append(self._empty_batch, ledger)

    def _give_up(self) -> None:
        """Count as dropped the rows that could not be written, so that the last ledger reports them."""
        reason = self._store.problem or "closing"
        while self._batches:
            batch = self._batches.popleft()
            self._batch_bytes -= batch.nbytes
            self._batch_rows -= batch.num_rows
            self._drop(reason, batch.num_rows)
            hint = "these exchanges were not stored; /api/v1/summary and the capture count them"
            log.error("event=capture_lost reason=%s exchanges=%d hint=%r", reason, batch.num_rows, hint)

    def _make_ledger(self, *, closed: bool = False) -> CaptureLedger:
        dropped = {**self._dropped_by_reason, **self._left_out_by_reason}
        return CaptureLedger(self._relays, dropped, self._meter_id, closed)

    def _count_error(self, error: BaseException) -> None:
        kind = type(error).__name__
        count = self._errors.get(kind, 0)
        self._errors[kind] = count + 1
        if not count:
            log.warning("event=capture_error kind=%s further=counted", kind, exc_info=error)


def _is_settled(ledger: CaptureLedger) -> bool:
    return not any(count.unsettled for count in ledger.relays.values())


def _relay_number(relay: str) -> int:
    """Return NUMBER of a relay's name RUN.INDEX.NUMBER, the serial number of its start; 0 for other names."""
    number = relay.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def _bytes_of(x: Exchange) -> int:
    """Return the memory of an exchange without the data of its request, which `_RequestMemory` counts."""
    return memory_bytes(x) - memory_bytes(x.capture_data)
