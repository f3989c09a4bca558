"""`llmtap report RESULTS --compare OTHER`: results of benchmarks held against each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtap.cli.outputs import STDOUT, need_outputs, write_output
from llmtap.errors import ConfigError, install_hint

__all__ = ["compared"]


def compared(
    places: Sequence[str], others: Sequence[str], *, as_json: bool, html: str | None, markdown: str | None
) -> tuple[str | dict[str, Any], bool]:
    """What goes to stdout: a text that `--html -` or `--markdown -` asked for, or the public JSON; files are
    written. And whether it is a comparison: not where loads differ. Raises ConfigError where these cannot be
    compared."""
    if len(places) != 1:
        raise ConfigError(
            "--compare",
            f"{len(places)} results to compare with",
            "one, then --compare for each of the others",
        )
    outputs = need_outputs(json=STDOUT if as_json else None, html=html, markdown=markdown)
    from importlib.util import find_spec

    if find_spec("scipy") is None:
        raise ConfigError("--compare", "needs SciPy", install_hint("bench"))
    from llmtap.bench.report.compare import compare_results

    told = compare_results(Path(places[0]), [Path(other) for other in others])
    texts = {}
    if html is not None:
        from llmtap.report.bench import compare_html

        texts["--html"] = compare_html(told)
    if markdown is not None:
        from llmtap.report.bench import compare_markdown

        texts["--markdown"] = compare_markdown(told)
    for option, place in outputs.items():
        write_output(option, place, texts[option])
    to_stdout = [text for option, text in texts.items() if option not in outputs]
    return to_stdout[0] if to_stdout else told, not any(test["unlike"] for test in told["tests"])
