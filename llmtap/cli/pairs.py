"""`llmtap report FRONT BACK --pair`: pair the exchanges on both sides of a gateway, from 1 or 2 captures."""

from collections.abc import Sequence
from typing import Final

from llmtap.cli.shared import Outputs, json_text, print_rich
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import BACK, FRONT

EXCHANGES_MAX: Final = 200_000
"""Maximum number of exchanges of a capture to pair: all of them are in memory, about 20 KB each."""


def report_pairs(places: Sequence[str], outputs: Outputs, *, skip_broken: bool) -> None:
    """Pair the exchanges of one or two captures, and write or print the report. Raises ConfigError."""
    from llmtap.capture.read.reader import read
    from llmtap.pairing.summary import pair_captures
    from llmtap.report.pairs import pairs_html, pairs_markdown, render_pairs

    if len(places) not in (1, 2):
        problem = f"expected two captures, or one capture with both sides of a gateway, got {len(places)}"
        hint = (
            "such as llmtap report FRONT BACK --pair; to write JSON to a file, use --json=FILE, with the `=`"
        )
        raise ConfigError("--pair", problem, hint)
    captures = [read(place, skip_broken=skip_broken) for place in places]
    for place, capture in zip(places, captures, strict=True):
        if len(capture) > EXCHANGES_MAX:
            problem = f"has {len(capture):,} exchanges; at most {EXCHANGES_MAX:,} can be paired"
            raise ConfigError(place, problem, "name single files of each capture that cover the same time")
    keys = {capture.info.pair_key for capture in captures}
    if len(captures) == 2:
        fronts, backs = (list(capture.exchanges()) for capture in captures)
    else:
        exchanges = list(captures[0].exchanges())
        fronts, backs = ([x for x in exchanges if x.side == side] for side in (FRONT, BACK))
        if not fronts or not backs:
            hint = "name two captures, or a capture of a proxy that has [pair] in its configuration"
            raise ConfigError(places[0], "does not have both sides of a gateway", hint)
    summary = pair_captures(fronts, backs, comparable=len(keys) == 1 and "" not in keys)
    texts = {
        "--json": lambda: json_text(summary),
        "--html": lambda: pairs_html(summary),
        "--markdown": lambda: pairs_markdown(summary),
    }
    outputs.write_or_show(texts, lambda: print_rich(render_pairs(summary)))
