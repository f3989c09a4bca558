"""`llmtap report --compare`: compare stored results of replays or of benchmarks."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from llmtap.cli.results import exit_with, load_result, result_errors
from llmtap.cli.shared import Outputs, json_text, need_extra, print_rich
from llmtap.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from llmtap.gates.regression import Tolerances
    from llmtap.report.gates import JudgedChange


def compare(
    places: Sequence[str], others: Sequence[str], outputs: Outputs, tolerances: "Tolerances | None"
) -> None:
    """Compare the result `places[0]` with `others`, and write or print the report. Raises ConfigError."""
    if len(places) != 1:
        hint = (
            "give one result, then --compare RESULT for each other; to write JSON to a file, use --json=FILE"
        )
        raise ConfigError("--compare", f"expected one result before --compare, got {len(places)}", hint)
    need_extra("--compare", "scipy", "bench")
    results = {place: load_result(place) for place in (places[0], *others)}
    if any(result is not None for result in results.values()):
        with result_errors(" or ".join(results)):
            _compare_replays([places[0], *others], results, outputs, tolerances)
        return
    from llmtap.cli.bench import compare_folders

    with result_errors(" or ".join((places[0], *others))):
        code = compare_folders(Path(places[0]), [Path(other) for other in others], outputs, tolerances)
    raise typer.Exit(code)


def _compare_replays(
    places: Sequence[str],
    results: Mapping[str, dict[str, Any] | None],
    outputs: Outputs,
    tolerances: "Tolerances | None",
) -> None:
    from llmtap.gates.regression import judge_replays, regression_code
    from llmtap.load.replay.comparison import compare_replays, comparison_document, render_replay_comparison
    from llmtap.load.replay.saved_replay import SavedReplay
    from llmtap.report.render import markdown, page_html

    if missing := [place for place, result in results.items() if result is None]:
        if not Path(missing[0]).exists():
            place = "CAPTURE" if missing[0] == places[0] else "--compare"
            raise ConfigError(place, f"there is no file {missing[0]}", "check the path")
        hint = "compare results of `llmtap replay --json` only with each other"
        raise ConfigError("--compare", f"{missing[0]} is not a result of llmtap replay", hint)
    if len(results) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise ConfigError("--compare", f"{twice} is given twice", "give each result once")
    names = [Path(place).stem for place in places]
    labels = names if len(set(names)) == len(names) else places
    named = {label: stored for label, place in zip(labels, places, strict=True) if (stored := results[place])}
    replays = {
        label: SavedReplay.of(named[label], place) for label, place in zip(labels, places, strict=True)
    }
    comparison = compare_replays(replays)
    judged: list[JudgedChange] = []
    if tolerances is not None:
        judged = judge_replays(tolerances, named, partial(compare_replays, replays))
        comparison = msgspec.structs.replace(comparison, regression=judged)
    texts = {
        "--json": lambda: json_text(comparison),
        "--html": lambda: page_html(comparison_document(comparison), "replay_page.css"),
        "--markdown": lambda: markdown(comparison_document(comparison), special="|"),
    }
    outputs.write_or_show(texts, lambda: print_rich(render_replay_comparison(comparison)))
    verdicts = [result.verdict for result in comparison.results]
    differ = not comparison.same_load
    if tolerances is None:
        failed = any(verdict.get("failed") for verdict in verdicts)
        not_valid = differ or any(not verdict["valid"] for verdict in verdicts)
        exit_with(ExitCode.of_run(failed=failed, not_valid=not_valid))
    else:
        exit_with(regression_code(verdicts, judged, loads_differ=differ))
