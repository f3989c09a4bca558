"""The report of pairs: its sentence, its tables, and what is said if nothing can be compared."""

from typing import Any

from msgspec.structs import replace

from llmtap.pairing.clock import SAME_CLOCK
from llmtap.pairing.summary import PairSummary, pair_captures
from llmtap.report.pairs import headline, pairs_html, pairs_markdown
from tests.support.traffic.gateway import MS, US, Crossing, words


def summary(n: int = 30, *, comparable: bool = True, **changes: Any) -> PairSummary:
    crossings = [Crossing(prompt=f"p{i}", at_ns=10**9 * (i + 1)).with_(**changes) for i in range(n)]
    played = [crossing.play(seq) for seq, crossing in enumerate(crossings, 1)]
    backs = [back for _, own in played for back in own]
    return pair_captures([front for front, _ in played], backs, comparable=comparable, clock=SAME_CLOCK)


def test_the_headline_has_what_the_gateway_adds() -> None:
    assert headline(summary(group=4, first_ns=400 * US).figures) == (
        "The gateway adds 38.4 ms to the first token (38.4 to 38.4), 15.4 ms to each token,"
        " and changes 1 to 4 tokens per event."
    )


def test_tables_and_the_chart_show_the_figures() -> None:
    result = summary(deliver=lambda tokens: tokens[:8], tokens=words(40))
    text = pairs_markdown(result)
    row = next(line for line in text.splitlines() if line.startswith("| request, ms |"))
    assert [cell.strip() for cell in row.strip("|").split("|")][:2] == ["request, ms", "30"]
    assert "| pairs | 30; by prompt 30 |" in text
    assert "## Texts that differ" in text
    page = pairs_html(result)
    assert "Delay from the back to the front" in page and "delays-0" in page


def test_each_arm_has_its_sentence_and_its_table() -> None:
    plain, guarded = summary(), summary(request_ns=308 * MS)
    text = pairs_markdown(replace(plain, arms={"guarded": guarded.figures, "plain": plain.figures}))
    assert "guarded: The gateway adds 313 ms to the first token" in text
    assert "plain: The gateway adds 13.0 ms to the first token" in text
    tables = [line for line in text.splitlines() if line.startswith("| request, ms |")]
    assert [table.split("|")[3].strip().split(" ")[0] for table in tables] == ["308", "8.00"]


def test_captures_that_cannot_be_compared_are_named_as_such() -> None:
    text = pairs_markdown(summary(1, comparable=False))
    assert "No exchange of the front has a pair." in text
    assert "do not have the same capture.pair\\_key" in text
