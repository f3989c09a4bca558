"""What the meter finishes gets into the files, or is counted; and nothing of it reaches the meter's loop.

Exchanges here are made by the observer, as in the meter; the store is a real one, on a folder.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import llmtap
from llmtap.capture.options import CaptureOptions, salt_of
from llmtap.capture.schema import CaptureInfo
from llmtap.capture.store.store import Store
from llmtap.clock import SystemClock
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.export.sinks import SeriesKey
from llmtap.meter.pipeline import recorder as module
from llmtap.meter.pipeline.recorder import Recorder
from llmtap.metrics.latency import measure
from tests.support.waiting import block_until

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"model":"m","choices":[{"index":0,"delta":{"content":"fine"},"finish_reason":"stop"}]}\n\n'


def recording(
    folder: Path,
    *,
    encode: Any = None,
    waits: bool = False,
    after: int = 0,
    salt: bytes = bytes(32),
    **options: Any,
) -> Recorder:
    chosen = CaptureOptions(to=str(folder), **options)
    info = CaptureInfo(capture="c", level=chosen.level, block_size=16, block_unit="bytes")
    return Recorder(chosen, SystemClock(), info, salt=salt, after=after, encode=encode, waits=waits)


def play(
    recorder: Recorder,
    seq: int = 1,
    text: str = "hello",
    *,
    tenant: str = "default",
    session: str = "s1",
    relay: str = "r",
) -> Exchange:
    """One exchange from its first byte to its last."""
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": "m", "stream": True, "messages": messages}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        f"x-session-id: {session}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    observer = Observer(
        relay,
        seq,
        seq * 10**9,
        seq * 10**9,
        head.encode(),
        identify=lambda head, path, body: tenant,
        on_request=recorder.observe_request,
    )
    observer.request_data(body, 1)
    observer.request_end(1)
    observer.on_submit(2, 1)
    observer.response_head(ANSWER, seq * 10**9 + 3_000, 1)
    observer.response_data(EVENT, seq * 10**9 + 4_000, 1)
    observer.response_end(seq * 10**9 + 5_000)
    x = observer.finish(seq * 10**9 + 6_000, "complete", None, None, 0, 0, len(body), len(EVENT))
    recorder.on_end(x, measure(x), SeriesKey("t", "m"), None)
    return x


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = llmtap.read(folder).table().to_pylist()
    return sorted(rows, key=lambda row: row["seq"])


def test_a_pair_key_stores_lengths_and_hashes_of_the_answer(tmp_path: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, key in (("front", "k" * 16), ("back", "k" * 16), ("other", "o" * 16), ("none", None)):
        recorder = recording(tmp_path / name, pair_key=key, salt=salt_of(key))
        recorder.start()
        x = play(recorder)
        recorder.close(60, whole=True)
        rows[name] = rows_of(tmp_path / name)
        assert not x.timeline.events.chars and x.text is None and x.text_blocks is None
    shown = {name: (row["event_chars"], row["text_blocks"], row["blocks"]) for name, (row,) in rows.items()}
    assert shown["front"] == shown["back"]
    assert shown["front"][0] == [4] and len(shown["front"][1]) == 1
    assert shown["other"][0] == [4]
    assert shown["other"][1] != shown["front"][1] and shown["other"][2] != shown["front"][2]
    assert shown["none"][:2] == (None, None)
    assert all(row["response_text"] is None for (row,) in rows.values())


def test_what_is_handed_over_is_in_the_spool_soon_and_in_a_file_at_the_end(tmp_path: Path) -> None:
    recorder = recording(tmp_path)
    recorder.start()
    for seq in range(1, 11):
        play(recorder, seq)
    block_until(lambda: recorder.state().exchanges == 10)
    assert recorder.state().waiting == 0 and not list(tmp_path.glob("*.parquet"))
    recorder.note_relay("r", 12, {"overflow": 2}, 0)
    recorder.close(60, whole=True)
    rows = rows_of(tmp_path)
    assert [row["seq"] for row in rows] == list(range(1, 11))
    assert {row["session_source"] for row in rows} == {"explicit"} and rows[3]["turn"] == 3
    (capture,) = llmtap.read(tmp_path).integrity().captures
    assert capture.closed and capture.missing == 2 and capture.unexplained == 0


def test_beyond_the_bound_on_memory_exchanges_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recording(tmp_path, memory_bytes=1 << 20)
    for seq in range(1, 301):  # its thread does not run yet, so all of them wait
        play(recorder, seq, "x" * 2_000)
    state = recorder.state()
    assert state.dropped["memory"] > 0 and state.waiting < 600
    recorder.start()
    recorder.close(60)
    kept = len(rows_of(tmp_path))
    assert kept + state.dropped["memory"] == 300 and kept > 100


def start_exchange(recorder: Recorder, seq: int, messages: int) -> Observer:
    """An exchange whose request is whole, and whose response has not begun."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    observer = Observer(
        "r",
        seq,
        seq,
        seq,
        head.encode(),
        identify=lambda head, path, body: "t",
        on_request=recorder.observe_request,
    )
    observer.request_data(body, 1)
    observer.request_end(1)
    return observer


def test_shapes_of_requests_under_way_count_against_the_bound_on_memory(tmp_path: Path) -> None:
    recorder = recording(tmp_path, memory_bytes=4 << 20)
    recorder.start()
    observers = []
    for seq in range(1, 41):
        observers.append(start_exchange(recorder, seq, 3_000))
        block_until(lambda: recorder.state().waiting == 0)  # no request waits, so only shapes are counted
    assert 0 < recorder._pending_bytes <= (4 << 20) + (1 << 20), "at most one shape above the limit"
    assert recorder.state().unshaped > 20
    shaped = [o.exchange for o in observers if o.exchange.shape is not None]
    assert 0 < len(shaped) == 40 - recorder.state().unshaped
    for observer in observers:
        recorder.on_end(
            observer.finish(1_000_000, "client_cancelled", None, None, 0, 0, 0, 0), None, None, None
        )
        recorder.flush()  # rows that wait to be written count, too
        block_until(lambda: not recorder.is_flushing)
    recorder.close(60)
    assert recorder._pending_bytes == 0, "all shapes are released"
    dropped = recorder.state().dropped.get("memory", 0)
    assert (len(rows_of(tmp_path)), dropped < 10) == (40 - dropped, True)


def test_a_folder_that_cannot_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_OPEN_NS", 50_000_000)
    folder = tmp_path / "capture"
    folder.write_text("in the way")
    recorder = recording(folder)
    recorder.start()
    play(recorder)
    block_until(lambda: recorder.state().waiting == 1)
    assert recorder.state().problem == "folder"
    pause = block_until(lambda: recorder.state().pause)
    assert pause.reason == "folder"
    assert str(folder) in pause.sentence
    folder.unlink()
    block_until(lambda: recorder.state().exchanges == 1)
    assert recorder.state().problem is None
    block_until(lambda: recorder.state().pause is None)
    recorder.close(60)
    assert len(rows_of(folder)) == 1


def test_whole_conversations_are_kept_in_full_or_not(tmp_path: Path) -> None:
    recorder = recording(tmp_path, level="full", full_tenants=("gold",), full_share=0.5)
    recorder.start()
    for talk in range(40):
        for turn in range(3):
            play(recorder, 1 + 3 * talk + turn, tenant="gold" if talk % 2 else "tin", session=f"t{talk}")
    recorder.close(60)
    by_tenant: dict[str, dict[str, list[bool]]] = {"gold": {}, "tin": {}}
    for row in rows_of(tmp_path):
        talks = by_tenant[row["tenant"]]
        talks.setdefault(row["session"], []).append(row["request_body"] is not None)
    assert not any(any(kept) for kept in by_tenant["tin"].values())
    kept = by_tenant["gold"].values()
    assert len(kept) == 20 and all(len(of_talk) == 3 and len(set(of_talk)) == 1 for of_talk in kept)
    assert 0 < sum(of_talk[0] for of_talk in kept) < 20, "some, as the share is a half"


def test_what_a_relay_did_before_the_capture_began_is_not_missing_from_it(tmp_path: Path) -> None:
    chosen = CaptureOptions(to=str(tmp_path))
    info = CaptureInfo(capture="c", level="shape", block_size=2_048, block_unit="bytes")
    recorder = Recorder(chosen, SystemClock(), info, salt=bytes(32), after=3)
    recorder.start()
    recorder.note_relay("ab12.0.3", 8, {"no_meter": 5}, 2)  # it was there before
    recorder.note_relay("ab12.0.4", 2, {"no_meter": 2}, 0)  # and this one came later
    for seq in (9, 10):
        play(recorder, seq, relay="ab12.0.3")
    recorder.note_relay("ab12.0.3", 12, {"no_meter": 5, "overflow": 1}, 0)
    recorder.close(60, whole=True)
    (capture,) = llmtap.read(tmp_path).integrity().captures
    old, new = capture.relays
    assert old.ranges == [(11, 12)] and old.dropped == {"overflow": 1} and old.unexplained == 1
    assert new.ranges == [(1, 2)] and new.unexplained == 0


def test_the_end_of_the_last_running_exchange_is_reported_without_traffic(tmp_path: Path) -> None:
    recorder = recording(tmp_path)
    recorder.start()
    recorder.note_relay("r", 2, {}, 1)
    play(recorder, 1)
    block_until(lambda: recorder.state().exchanges == 1)
    (capture,) = llmtap.read(tmp_path).integrity().captures
    assert (capture.running, capture.missing) == (1, 0)
    recorder.note_relay("r", 2, {"meter_lost": 1}, 0)
    block_until(lambda: llmtap.read(tmp_path).integrity().captures[0].exact)
    (capture,) = llmtap.read(tmp_path).integrity().captures
    assert (capture.running, capture.missing, capture.unexplained) == (0, 1, 0)
    recorder.close(60)


def test_two_recorders_of_one_capture_of_which_one_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_OPEN_NS", 50_000_000)
    old, new = recording(tmp_path), recording(tmp_path, waits=True)
    old.start()
    play(old, 1, relay="r.0.1")
    block_until(lambda: old.state().exchanges == 1)
    new.start()
    play(new, 1, relay="r.0.2")
    block_until(lambda: new.state().waiting == 1)
    assert new.state().exchanges == 0, "the folder is the old one's"
    old.give_way()
    block_until(lambda: new.state().exchanges == 1)
    play(old, 2, relay="r.0.1")
    block_until(lambda: old.state().exchanges == 2)
    (aside,) = (tmp_path / ".spool").glob("aside-*")
    assert list(aside.glob("*.spool"))
    assert new.state().recovered == 0, "a spool that is written to is not taken for one that was left"
    play(new, 2, relay="r.0.2")
    old.note_relay("r.0.1", 2, {}, 0)
    new.note_relay("r.0.2", 2, {}, 0)
    old.close(10)
    new.close(10, whole=True)
    assert sorted((row["relay"], row["seq"]) for row in rows_of(tmp_path)) == [
        ("r.0.1", 1),
        ("r.0.1", 2),
        ("r.0.2", 1),
        ("r.0.2", 2),
    ]
    (capture,) = llmtap.read(tmp_path).integrity().captures
    assert (capture.present, capture.missing, capture.meters, capture.closed) == (4, 0, 2, True)
    assert not aside.exists()


@pytest.mark.parametrize(("waits", "after", "closed"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_recorder_that_continues_a_capture_stores_its_end_without_rows(
    tmp_path: Path, waits: bool, after: int, closed: bool
) -> None:
    old, new = recording(tmp_path), recording(tmp_path, waits=waits, after=after)
    old.start()
    play(old, 1, relay="r.0.1")
    old.note_relay("r.0.1", 1, {}, 0)
    old.close(10)
    new.start()
    new.note_relay("r.0.2", 0, {}, 0)
    new.close(10, whole=True)
    (capture,) = llmtap.read(tmp_path).integrity().captures
    assert capture.closed is closed


def test_what_cannot_be_written_at_the_end_is_in_the_last_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recording(tmp_path)
    append = Store.append
    monkeypatch.setattr(
        Store, "append", lambda self, batch, ledger: batch.num_rows == 0 and append(self, batch, ledger)
    )
    recorder.start()
    for seq in range(1, 6):
        play(recorder, seq)
    recorder.note_relay("r", 5, {}, 0)
    recorder.close(60, whole=True)
    (capture,) = llmtap.read(tmp_path).integrity().captures
    assert (capture.missing, capture.unexplained, sum(capture.not_kept.values())) == (5, 0, 5)


def test_what_is_no_model_traffic_is_neither_missing_nor_dropped(tmp_path: Path) -> None:
    recorder = recording(tmp_path)
    recorder.start()
    play(recorder, 1)
    recorder.leave_out("mcp")
    play(recorder, 3)
    recorder.note_relay("r", 3, {}, 0)
    assert recorder.state().dropped == {}
    recorder.close(60, whole=True)
    integrity = llmtap.read(tmp_path).integrity()
    (capture,) = integrity.captures
    assert (integrity.ok, capture.not_kept, capture.missing, capture.unexplained) == (True, {"mcp": 1}, 1, 0)
