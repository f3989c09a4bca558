"""Main program of the meter process, and `serve()`, which runs a meter without a supervisor (`llmtap meter`).

It starts the pipeline, the capture's recorder, the OTLP exporter, the receiver of frames and the admin port.
The supervisor runs it as `python -m llmtap.meter` with a MeterSetup as one line of JSON on stdin, and ends it
by SIGTERM after its relays; `shutdown.py` lists the other events that end it, such as a closed stdin. If it
inherits the admin socket, the socket outlives this process, and scrapes wait while it restarts.

`OfflineMeter` is a meter inside this process, on frames from a file (`llmtap watch --read`, `inspect`).
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from llmtap import native
from llmtap.capture.tokenizer import Encode, load_tokenizer
from llmtap.channel.frames import Frame, Hello
from llmtap.channel.status import RelayStatus
from llmtap.clock import Clock, ManualClock, SystemClock
from llmtap.errors import LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.log import set_up
from llmtap.meter.admin.connections import AdminSite
from llmtap.meter.admin.server import admin_app, admin_runner
from llmtap.meter.admin.tls import AdminTls
from llmtap.meter.admin.views import summary_of
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.cooperative_yield import CooperativeYield
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.pipeline.receiver import Receiver, SocketFile, listen_on
from llmtap.meter.setup import Changeable, MeterSetup
from llmtap.meter.shutdown import ShutdownListener
from llmtap.meter.state import MeterState
from llmtap.net.listener import parse_address, raise_file_limit
from llmtap.protocol.dialects.registry import Dialects
from llmtap.units import decode_special
from llmtap.version import __version__

if TYPE_CHECKING:
    from llmtap.export.opentelemetry.exporter import OtlpExporter
    from llmtap.meter.pipeline.recorder import Recorder

NICE = 5
"""Nice value of the meter. With it, the meter gets a third of a relay's share if both want the same CPU
(benchmarks/relay/README.md)."""
READY_CHECK_S = 0.05
READY_CHECKS_MAX = 100
"""Number of checks (5 s) after which the admin port opens even without a ready relay."""
RECORDER_S = 4.0
"""Time limit for the last files of the capture, below that of the supervisor. The next start makes others."""

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM, or until the supervisor is gone and the relays have left."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()  # a buffer would take the next lines, which `ShutdownListener` reads
    setup = msgspec.json.decode(line, type=MeterSetup, dec_hook=decode_special)
    set_up(setup.changeable.log)
    _tune_process()
    uvloop.run(_run(setup))
    return 0


def serve(setup: MeterSetup, sock: socket.socket, announce: Callable[[], None]) -> None:
    """Run a meter without a supervisor on this listening socket, until SIGTERM, Ctrl-C or a hang-up."""
    _tune_process()
    uvloop.run(_run(setup, sock, announce))


def _tune_process() -> None:
    """Set nice value, limit of open files, and the garbage collector."""
    os.nice(NICE)
    raise_file_limit()
    # Objects that exist now stay until the end, so the collector need not visit them. Observers and exchanges
    # make no cycles, so collections can be rare. The middle generation is collected often, because slices of
    # many tenants outlive the first generation (benchmarks/meter/memory.py).
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 4, 250)


def _load_configured_tokenizer(text: str | None) -> Encode | None:
    if text is None:
        return None
    try:
        return load_tokenizer(text)
    except LlmtapError as exc:  # unlikely, since the proxy has loaded this tokenizer; measure without it
        hint = "tokens are measured without it: correct meter.tokenizer and reload"
        log.error("event=tokenizer_not_loaded error=%r hint=%r", str(exc), hint)
        return None


def _token_counter(encode: Encode | None) -> Callable[[str], int] | None:
    return None if encode is None else lambda text: len(encode(text))


def make_pipeline(setup: MeterSetup, clock: Clock) -> tuple[ExchangePipeline, Encode | None]:
    encode = _load_configured_tokenizer(setup.options.tokenizer)
    pipeline = ExchangePipeline(
        setup.options,
        clock,
        setup.experiment,
        tenants=setup.tenants,
        salt=setup.salt,
        slos=setup.slo,
        price=setup.cost.price,
        count_tokens=_token_counter(encode),
        dialects=Dialects(setup.dialects.values()),
    )
    if setup.pair is not None:
        # Imported only for pairs: numpy takes 20 MB and 100 ms.
        from llmtap.meter.pairs import PairBook

        pipeline.pair_with(
            PairBook(setup.pair, pipeline.relays, pipeline.streams, pipeline.cpu_yield, pipeline.on_error)
        )
    return pipeline, encode


def start_recorder(setup: MeterSetup, pipeline: ExchangePipeline, encode: Encode | None) -> "Recorder | None":
    """Start the recorder of the capture, a sink of the pipeline. If that fails, log it and return None."""
    # Imported only with a capture: Arrow takes 40 MB and 200 ms.
    from llmtap.capture.options import key_id_of
    from llmtap.capture.privacy.coarse import STEPS
    from llmtap.capture.schema import CaptureInfo
    from llmtap.meter.pipeline.recorder import Recorder

    options = setup.capture
    info = CaptureInfo(
        capture=setup.capture_id,
        tap_version=__version__,
        config=setup.changeable.config,
        level=options.level,
        coarse=STEPS if options.level == "coarse" else {},
        tokenizer=setup.options.tokenizer,
        block_unit="" if options.level == "none" else "bytes" if encode is None else "tokens",
        block_size=int(options.block_bytes) if encode is None else options.block_tokens,
        pair_key=key_id_of(options.pair_key),
    )
    try:
        recorder = Recorder(
            options,
            pipeline.clock,
            info,
            salt=bytes.fromhex(setup.capture_salt),
            after=setup.capture_after,
            encode=encode,
            waits=setup.takes_over,
        )
        recorder.start()
    except Exception as exc:  # an error of the capture must not affect the measurement
        pipeline.on_error("capture", exc)
        return None
    pipeline.attach_recorder(recorder)
    return recorder


def _start_exporter(setup: MeterSetup, pipeline: ExchangePipeline) -> "OtlpExporter | None":
    # Imported only with an endpoint: the SDK, protobuf and gRPC take 20 MiB of memory and 0.2 s.
    from llmtap.export.opentelemetry.exporter import OtlpExporter

    try:
        exporter = OtlpExporter(
            setup.otlp,
            pipeline.clock,
            __version__,
            setup.servers,
            back_server=setup.back_server,
            reader=pipeline.benefit,
        )
    except Exception as exc:  # an error of the exporter must not affect the measurement
        pipeline.on_error("otlp", exc)
        return None
    pipeline.last_sinks.append(exporter)
    pipeline.exporters.append(exporter.state)
    log.info("event=otlp_exporter protocol=%s semconv=%s", setup.otlp.protocol, setup.otlp.semconv)
    return exporter


def _announce_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


async def _run(
    setup: MeterSetup, sock: socket.socket | None = None, announce: Callable[[], None] = _announce_ready
) -> None:
    loop = asyncio.get_running_loop()

    def change(to: Changeable) -> None:
        set_up(to.log)
        if recorder is not None:
            recorder.set_config(to.config)

    ending = ShutdownListener(loop, setup.changeable.drain_s, change, supervised=sock is None)
    pipeline, encode = make_pipeline(setup, SystemClock())
    state = MeterState(setup.state, pipeline) if setup.state else None
    if state is not None:
        await state.start(takes_over=setup.takes_over)
    exporter = _start_exporter(setup, pipeline) if setup.otlp.is_enabled(os.environ) else None
    recorder = start_recorder(setup, pipeline, encode) if setup.capture.to else None
    receiver = Receiver(pipeline)
    await receiver.start(listen_on(setup.socket) if sock is None else sock)
    socket_file = SocketFile(setup.socket)
    logging.getLogger("aiohttp.server").addFilter(_is_own_fault)
    tls = AdminTls.from_options(setup.options)
    app = admin_app(pipeline, setup.options.admin_token)
    runner = admin_runner(app, None if tls is None else tls.context)
    await runner.setup()
    if setup.admin_fd is not None:
        site = AdminSite(runner, socket.socket(fileno=setup.admin_fd))
    else:
        site = AdminSite(runner, parse_address(setup.options.admin, "meter.admin"))
    opening = loop.create_task(_open_admin(site, pipeline, state, at_once=not setup.takes_over))
    if not setup.takes_over:
        await opening
    renewing = None if tls is None else asyncio.create_task(tls.renew())
    scraping = None if pipeline.upstream is None else asyncio.create_task(pipeline.upstream.run())
    announce()
    log.info(
        "event=meter_ready socket=%s admin=%s implementation=%r", setup.socket, site.name, native.describe()
    )

    await ending.wait()
    opening.cancel()
    for task in (renewing, scraping):
        if task is not None:
            task.cancel()
    closing = None
    is_replaced = ending.successor is not None
    if ending.successor is not None:
        # Close the admin port, because the successor answers all requests from now on.
        closing = loop.create_task(runner.cleanup())
        if recorder is not None:
            # Release the capture folder first: the successor waits for it, and writing the state takes time.
            recorder.give_way()
        if state is not None:
            await state.hand_over(ending.successor)
    elif ending.is_orphaned:
        # Release the port for a new start of the proxy; open connections stay.
        await site.stop()
    await ending.wait_for_relays(receiver)
    if not is_replaced:  # the supervisor removes the file of a replaced meter
        socket_file.remove()
    await receiver.close()
    if state is not None:
        await state.close()
    if pipeline.pairs is not None:
        pipeline.pairs.close()
    if recorder is not None:
        relays = pipeline.relays.states(pipeline.clock.mono_ns())
        # The capture is complete only if each relay ended with final counts.
        cut = [r.name for r in relays if r.connected or r.status is None or not r.status.draining]
        whole = not cut
        ends_capture = ending.ends_capture or not is_replaced
        if cut and ends_capture:
            log.warning(
                "event=capture_not_closed relays=%s reason='they ended without a final report'", ",".join(cut)
            )
        for relay in relays:
            if relay.status is not None and not relay.measured_elsewhere:
                last = relay.status
                recorder.note_relay(
                    relay.name, last.opened, last.dropped, last.unsettled, last.packets, last.watched
                )
        # If another meter continues the capture, close this meter's files only: the other meter completes the
        # capture.
        await asyncio.to_thread(recorder.close, RECORDER_S, whole=whole and ends_capture)
    if exporter is not None:
        await asyncio.to_thread(exporter.close)
    await (runner.cleanup() if closing is None else closing)


def _is_own_fault(record: logging.LogRecord) -> bool:
    """Return whether a log record of aiohttp reports a fault of llmtap. Other records are not logged: those
    on malformed requests (they can contain a key) and on clients that left early (uvloop's RuntimeError)."""
    error = record.exc_info[1] if record.exc_info else None
    is_closed = isinstance(error, RuntimeError) and "the handler is closed" in str(error)
    return not (is_closed or isinstance(error, HttpProcessingError))


async def _open_admin(
    site: web.BaseSite, pipeline: ExchangePipeline, state: MeterState | None, *, at_once: bool
) -> None:
    """Open the admin port `at_once`, or when a relay is ready and the state is read, after 5 s at the latest.
    Until then, the meter that this one replaces answers requests."""
    checks_left = 0 if at_once else READY_CHECKS_MAX

    def is_ready() -> bool:
        return pipeline.relays.has_ready_relay(pipeline.clock.mono_ns()) and (state is None or state.is_read)

    while checks_left and not is_ready():
        checks_left -= 1
        await asyncio.sleep(READY_CHECK_S)
    await site.start()


WAITING_MAX: Final = 2_000
"""Number of waiting exchanges above which reading the file pauses, because the capture is slower."""
WAIT_S: Final = 0.01
WAITS_MAX: Final = 6_000
"""Maximum number of waits of WAIT_S after a batch: one minute. If the capture is stuck (full disk), the
reading goes on, and the recorder drops exchanges and counts them."""
CLOSE_S: Final = 60.0


class OfflineMeter:
    """Meter for the frames of one vantage, without socket and admin port. Its clock shows the newest frame.

    Exchanges go through the pipeline of a meter process: they are measured, captured (if configured), and
    passed to a callback.

    Args:
        setup: settings as of a meter process; socket and admin port are not used.
        on_exchange: called with each finished exchange, in the order of their ends.
    """

    def __init__(
        self, setup: MeterSetup, hello: Hello, on_exchange: Callable[[Exchange], None] | None = None
    ) -> None:
        self._setup = setup
        self._hello = hello
        self._on_exchange = on_exchange
        """Function that is called with each finished exchange; None: none."""
        self._clock = ManualClock(wall_offset_ns=0)
        real = SystemClock()
        self._cpu_yield = CooperativeYield(real.mono_ns, lambda: None, real.thread_cpu_ns)
        self._recorder: Recorder | None = None
        self._pipeline: ExchangePipeline | None = None
        self._assembler: Assembler | None = None

    def digest(self, frames: Sequence[Frame], now_ns: int) -> None:
        """Measure a batch of frames; `now_ns`: newest time in the file so far."""
        if self._pipeline is None or self._assembler is None:
            # The windows begin with the first frame of the file.
            self._clock.now_ns = frames[0][2] if frames else now_ns
            self._begin()
            assert self._assembler is not None
        self._clock.now_ns = max(self._clock.now_ns, now_ns)
        assembler, turns = self._assembler, self._cpu_yield
        # `turns` measures the CPU time of each exchange, so that its limit applies as in a meter process.
        for _ in assembler.work(turns.pace(frames, None, assembler.charge), turns):
            turns.begin_turn()
        for _ in range(WAITS_MAX):
            if self._recorder is None or self._recorder.state().waiting <= WAITING_MAX:
                break
            time.sleep(WAIT_S)

    def finish(self, status: RelayStatus) -> dict[str, Any]:
        """End the capture; return the summary of the whole file as public JSON."""
        pipeline = self._pipeline
        assert pipeline is not None, "`digest` is called at least once, at the end of the file"
        pipeline.on_status(self._hello.relay, status)
        if self._recorder is not None:
            self._recorder.close(CLOSE_S, whole=True)
        summary: dict[str, Any] = summary_of(pipeline, "all")()
        summary["load"]["mode"] = "recorded"
        return summary

    def _begin(self) -> None:
        self._pipeline, encode = make_pipeline(self._setup, self._clock)
        if self._setup.capture.to:
            self._recorder = start_recorder(self._setup, self._pipeline, encode)
        if self._on_exchange is not None:
            self._pipeline.sinks.append(_ExchangeCallback(self._on_exchange))
        self._pipeline.relays.join(self._hello)
        self._assembler = Assembler(self._hello, self._pipeline)


class _ExchangeCallback:
    """Sink that calls a function with each exchange."""

    def __init__(self, on_exchange: Callable[[Exchange], None]) -> None:
        self._on_exchange = on_exchange

    def on_end(self, x: Exchange, *_: object) -> None:
        self._on_exchange(x)
