"""The reader's waits, event by event, add up to the user idle latency that the meter works out itself."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.latency import chunking_of, measure
from llmtap.top.views import inspected

MS = 1_000_000


def told(x: Exchange, benefit: Benefit | None = None) -> dict[str, Any]:
    metrics = measure(x, benefit or Benefit()).metrics()
    document: dict[str, Any] = json.loads(json.dumps(x.to_dict(metrics, chunking_of(x), events=True)))
    return document


def exchange(chunks: list[tuple[int, int]], *, declared: bool = True, total: int | None = None) -> Exchange:
    """Chunks as (ms since submit, tokens); submitted 3 ms after arrival at 1 s."""
    log = EventLog()
    arrival, submit = 1_000 * MS, 1_003 * MS
    log.add(submit + MS, EventClass.ROLE, 50, -1, 0)
    for t_ms, tokens in chunks:
        log.add(submit + t_ms * MS, EventClass.CONTENT, 100, tokens if declared else -1, OUTPUT)
    log.add(log.t_ns[-1] + MS, EventClass.DONE, 12, -1, 0)
    first = submit + chunks[0][0] * MS
    count = sum(n for _, n in chunks) if total is None else total
    return Exchange(
        relay="r", seq=1, arrival_wall_ns=0, stream=True, status=200, method="POST", path="/v1/x",
        timeline=Timeline(
            arrival_ns=arrival, submit_ns=submit, first_any_ns=submit + MS, first_token_ns=first,
            first_content_ns=first, last_token_ns=log.t_ns[-2], response_end_ns=log.t_ns[-1], events=log,
        ),
        tokens=Tokens(output=count, source=TokenSource.USAGE),
    )  # fmt: skip


def waits_ms(x: dict[str, Any], v_ns: int = 50 * MS) -> list[float]:
    texts = [row.cells[-1].text for row in inspected(x, v_ns).rows]
    return [float(t.split()[1].replace(",", "")) for t in texts if t.startswith("WAITS")]


def test_a_worked_example() -> None:
    """A reader of 20 tokens/s: 2 tokens at 100 ms, 1 at 180, 1 at 400."""
    table = inspected(told(exchange([(100, 2), (180, 1), (400, 1)])))
    assert [tuple(cell.text for cell in row.cells) for row in table.rows] == [
        ("0", "1.00", "-", "role", "-", "50", "-", ""),
        ("1", "100", "99.0", "content", "2", "100", "0", "WAITS 100 ms"),
        ("2", "180", "80.0", "content", "1", "100", "200", "20.0 ms ahead"),
        ("3", "400", "220", "content", "1", "100", "250", "WAITS 150 ms"),
        ("4", "401", "1.00", "done", "-", "12", "-", ""),
    ]
    assert table.notes == ("a reader of 20 tokens/s, from submit on",)
    assert told(exchange([(100, 2), (180, 1), (400, 1)]))["metrics"]["user_idle"] == pytest.approx(0.25)


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 6)), min_size=1, max_size=30),
    st.booleans(),
    st.integers(0, 60) | st.none(),
    st.sampled_from((5.0, 20.0, 33.0)),
)
def test_waits_add_up_to_the_meters_figure(
    gaps: list[tuple[int, int]], declared: bool, total: int | None, speed: float
) -> None:
    t_ms, chunks = 2, []
    for gap, tokens in gaps:
        t_ms += gap
        chunks.append((t_ms, tokens))
    benefit = Benefit.at_speed(speed)
    document = told(exchange(chunks, declared=declared, total=total), benefit)
    summed = sum(waits_ms(document, benefit.reader_ns_per_token))
    # Texts have three digits.
    assert summed == pytest.approx(document["metrics"]["user_idle"] * 1e3, rel=0.006, abs=0.01)


def test_tokens_that_nobody_declares_are_told_as_what_they_count_for() -> None:
    x = exchange([(100, 1), (180, 1)], declared=False)
    x.tokens.source = TokenSource.CHUNKS
    table = inspected(told(x))
    assert [row.cells[4].text for row in table.rows] == ["-", "~1", "~1", "-"]
    assert "~1: no token count declared" in table.notes[0]
