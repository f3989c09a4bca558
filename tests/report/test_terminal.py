import pytest

from llmtap.exchange.exchange import OUTPUT, EventLog, Exchange, Timeline, Tokens
from llmtap.exchange.outcome import EventClass, TokenSource
from llmtap.metrics.summary import Summary
from llmtap.report.terminal import milliseconds, summary_text

MS = 1_000_000


def summary(n: int) -> dict[str, object]:
    s = Summary()
    for i in range(n):
        log = EventLog()
        for t in (100 + i % 7, 140, 181):
            log.add(t * MS, EventClass.CONTENT, 10, 1, OUTPUT)
        t = Timeline(
            arrival_ns=0, submit_ns=0, first_byte_ns=log.t_ns[0], first_token_ns=log.t_ns[0],
            first_content_ns=log.t_ns[0], last_token_ns=log.t_ns[-1], response_end_ns=1_234 * MS, events=log,
        )  # fmt: skip
        x = Exchange(relay="r", seq=1, arrival_wall_ns=0, timeline=t, stream=True, uncertainty_ns=350_000)
        x.tokens = Tokens(output=3, source=TokenSource.TOKEN_IDS)
        x.added.chunks_ns.extend([12_345] * 3)
        s.add(x)
    return s.to_dict({"name": "1m", "seconds": 10.0}, 10.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0"), (0.000012345, "0.0123"), (0.00012345, "0.123"), (0.0012345, "1.23"),
     (0.0099951, "10.0"), (0.012345, "12.3"), (0.12345, "123"), (1.2345, "1,234"), (0.0009996, "1.00"),
     (-0.05, "-50.0")],
)  # fmt: skip
def test_milliseconds_have_three_significant_digits(seconds: float | None, text: str) -> None:
    assert milliseconds(seconds) == text


def test_the_table_names_what_makes_its_figures_believable() -> None:
    text = summary_text(summary(20))
    rows = text.splitlines()
    for said in (
        "window 1m (10.0 s)",
        "n 20",
        "2 req/s",
        "ITL option B-even",
        "tokens by token_ids",
        "uncertainty 0.350 ms",
    ):
        assert said in text.replace("\n", " ").replace("  ", " ")
    ttft = next(row for row in rows if row.startswith("TTFT "))
    assert ttft.split()[1:4] == ["20", "103", "103"]
    assert any(row.startswith("added, chunk") and "0.0123" in row for row in rows)
    assert any(row.startswith("outcomes") and "complete 20" in row for row in rows)


def test_percentiles_of_too_few_samples_are_marked() -> None:
    assert "106*" in summary_text(summary(20))
    assert "fewer than 1,000 samples" in summary_text(summary(20))
    full = summary(1_000)
    full["added"] = {}
    assert "*" not in summary_text(full)


def test_eighty_columns_and_no_colour_are_enough() -> None:
    text = summary_text(summary(1_000), width=80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_an_empty_summary_prints() -> None:
    text = summary_text(Summary().to_dict({"name": "1m", "seconds": 0.0}, 0.0))
    assert "n 0" in text
    assert "*" not in text


def test_relays_show_what_was_not_measured() -> None:
    shown = summary(1)
    shown["relays"] = {
        "r0": {"connected": True, "opened": 10, "measured": 7, "dropped": {"tap_full": 2}, "lag_max": 0.0021},
        "r1": {"connected": False},
    }
    text = summary_text(shown)
    assert "r0: opened 10 · measured 7 · not measured 2 · lag max 2.10 ms" in text
    assert "r1: no status yet" in text
