"""What the whole observer makes of it is in `test_observer.py`; here is the order in which signs count."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.exchange.outcome import EventClass
from llmtap.exchange.verdict import ServerTiming, figures_of, is_word
from llmtap.protocol.delta import Delta, ServerTime


def test_of_a_usage_figures_and_words_are_kept() -> None:
    usage = {
        "prompt_tokens": 9, "share": 0.5, "tier": "default", "none": None, "note": "a text of several words",
        "not a name": 1, "huge": 1 << 60, "nan": float("nan"), "list": [1],
        "a": {"b": {"c": {"d": 1, "n": 2}, "n": 1}},
    }  # fmt: skip
    assert figures_of(usage) == {
        "prompt_tokens": 9, "share": 0.5, "tier": "default", "none": None,
        "a": {"b": {"c": {"d": 1, "n": 2}, "n": 1}},
    }  # fmt: skip
    assert figures_of({"a": {"b": {"c": {"d": {"e": 1}}}}}) == {"a": {"b": {"c": {}}}}
    assert len(figures_of({f"n{i}": i for i in range(100)})) == 64


def test_words_are_short_and_of_one_piece() -> None:
    assert is_word("content_filter") and is_word("a" * 64)
    assert not any(map(is_word, ("", "a b", "a" * 65, "a\n")))


UNTIMED = settings(deadline=None)  # a busy machine is no failure


def told(*times: ServerTime, clock_ns: int = -1, tokens: int = -1) -> Delta:
    return Delta(EventClass.CONTENT, server_times=times, server_clock_ns=clock_ns, tokens=tokens)


def test_the_last_of_the_same_counts_and_all_places_are_kept() -> None:
    server = ServerTiming()
    server.read_head([(b"Server-Timing", b"queue;dur=3")])
    server.read_event(4, told(ServerTime("decode", 1.0, "timings", "timings.predicted_ms")))
    server.read_event(9, told(ServerTime("decode", 8.0, "timings", "timings.predicted_ms")))
    server.read_event(9, told(ServerTime("total", 9.0, "usage", "usage.total_latency", "s")))
    server.read_trailers([b"server-timing: total;dur=12\r\n"])
    assert server.entries() == [
        {"name": "queue", "ms": 3.0, "where": "header:server-timing", "unit": "ms"},
        {"name": "decode", "ms": 8.0, "where": "timings", "unit": "ms", "event": 9,
         "path": "timings.predicted_ms"},
        {"name": "total", "ms": 9.0, "where": "usage", "unit": "s", "event": 9,
         "path": "usage.total_latency"},
        {"name": "total", "ms": 12.0, "where": "trailer:server-timing", "unit": "ms"},
    ]  # fmt: skip


def test_nothing_told_is_nothing() -> None:
    assert (ServerTiming().entries(), ServerTiming().gaps_ns()) == (None, None)


def test_gaps_by_the_servers_clock() -> None:
    server = ServerTiming()
    for clock_ns, tokens in ((20, 1), (50, 1), (-1, -1), (91, 4), (91, -1), (5, 1), (6, 1), (7, 1 << 40)):
        server.read_event(0, told(clock_ns=clock_ns, tokens=tokens))
    # The clock that went back was set anew, and a thousand million tokens are no gap to share.
    assert list(server.gaps_ns() or ()) == [30, 10, 10, 10, 11, 0, 1]


def test_gaps_are_bounded_however_many_tokens_events_declare() -> None:
    server = ServerTiming()
    for clock_ns in range(0, 300 * 1_024, 1_024):
        server.read_event(0, told(clock_ns=clock_ns, tokens=1_024))
    assert list(server.gaps_ns() or ()) == [1] * (1 << 18)


@UNTIMED
@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 9)), min_size=2, max_size=20))
def test_gaps_add_up(steps: list[tuple[int, int]]) -> None:
    server = ServerTiming()
    clock_ns = 0
    for gap_ns, tokens in steps:
        clock_ns += gap_ns
        server.read_event(0, told(clock_ns=clock_ns, tokens=tokens))
    gaps = server.gaps_ns()
    assert gaps is not None
    assert sum(gaps) == sum(gap_ns for gap_ns, _ in steps[1:])
    assert len(gaps) == sum(tokens for _, tokens in steps[1:])


@UNTIMED
@given(st.lists(st.text(max_size=4), max_size=200))
def test_a_talkative_server_is_cut_short(names: list[str]) -> None:
    server = ServerTiming()
    for i, name in enumerate(names):
        server.read_event(i, told(ServerTime(name, 1.0, "x")))
    assert len(server.entries() or ()) <= 64
