"""Stored results of replays and experiments: load a result, show it, and store it next to a capture."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, Final

import msgspec
import typer

from llmtap.cli.shared import Outputs, json_text, print_rich, write_output
from llmtap.errors import ConfigError, ExitCode

RESULT_BYTES_MAX: Final = 256 << 20
"""Maximum size of a file that is read as a result. A result has a few MB: one value per second and series."""
RESULT_PATTERN: Final = "replay-*.json"
"""Pattern of the second part of a result's file name; the first part is the capture folder's name and `.`."""
_REPLAY_FIELDS: Final = frozenset({"load", "sender", "plan", "metrics", "verdict"})
"""Fields by which the result of a replay is recognised."""
_EXPERIMENT_FIELDS: Final = frozenset({"state", "arms", "differences", "sample_ratio"})
"""Fields by which the stored answer of `/api/v1/experiment` is recognised."""


def exit_with(code: ExitCode) -> None:
    """End the command with this exit code, unless it is OK."""
    if code:
        raise typer.Exit(code)


@contextmanager
def result_errors(place: str) -> Iterator[None]:
    """Convert the errors that a wrong or missing field of a stored result causes into a ConfigError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as exc:
        what = f"the field {exc.args[0]!r} is missing" if isinstance(exc, KeyError) else str(exc)
        raise ConfigError(
            place,
            f"is not a result that this version of llmtap can show: {what[:200]}",
            "it was edited, or another version of llmtap wrote it",
        ) from exc


def load_result(place: str | Path) -> dict[str, Any] | None:
    """Return the result that `llmtap replay --json` wrote to a file; None for any other file."""
    return _load_json(place, _REPLAY_FIELDS)


def load_experiment(place: str | Path) -> dict[str, Any] | None:
    """Return the result of an experiment that was stored in a file; None for any other file."""
    return _load_json(place, _EXPERIMENT_FIELDS)


def _load_json(place: str | Path, fields: Set[str]) -> dict[str, Any] | None:
    """Return the JSON object of a file that has these fields; None for any other file."""
    path = Path(place)
    try:
        if not path.is_file() or path.stat().st_size > RESULT_BYTES_MAX:
            return None
        with path.open("rb") as file:
            begin = file.read(64)
            if not begin.lstrip().startswith(b"{"):
                return None
            raw = begin + file.read()
        if not fields <= msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys():
            return None
        result: dict[str, Any] = msgspec.json.decode(raw)
    except (OSError, ValueError, RecursionError):
        return None
    return result


def show_experiment(outputs: Outputs, experiment: Mapping[str, Any]) -> None:
    """Write the requested outputs of an experiment, or print its report."""
    from llmtap.report.experiment_page import render_experiment

    outputs.write_or_show(experiment_texts(experiment), lambda: print_rich(render_experiment(experiment)))


def experiment_texts(experiment: Mapping[str, Any]) -> dict[str, Callable[[], str]]:
    """Return by option (such as `--html`) a function that returns the text of an experiment's output."""
    from llmtap.report.experiment_page import experiment_html, experiment_markdown

    return {
        "--json": lambda: json_text(experiment),
        "--html": lambda: experiment_html(experiment),
        "--markdown": lambda: experiment_markdown(experiment),
    }


def show_replay(outputs: Outputs, result: Mapping[str, Any]) -> None:
    """Write the requested outputs of a replay's result, or print its report."""
    from llmtap.gates.figures import figures_csv
    from llmtap.report.replay import render_replay, replay_html, replay_markdown

    texts = {
        "--json": lambda: json_text(result),
        "--html": lambda: replay_html(result),
        "--markdown": lambda: replay_markdown(result),
        "--csv": lambda: figures_csv(result),
    }
    outputs.write_or_show(texts, lambda: print_rich(render_replay(result)))


def result_place(capture: str, result: Mapping[str, Any] | None = None) -> Path | None:
    """Return the path for the result of a replay, next to the folder of its capture; None for a URL.

    It is not in the folder itself, so that the folder has only Parquet files and other tools can read it as
    one dataset. The name contains the start time of `result`; if `result` is None, the time is missing.
    """
    from llmtap.capture.store.parquet import place_of

    folder = place_of(capture).folder
    if folder is None:
        return None
    time_text = "" if result is None else re.sub(r"\W", "", str(result["window"]["start"]))
    folder = folder.resolve()
    return folder.parent / f"{folder.name}.{RESULT_PATTERN.replace('*', time_text)}"


def store_result(capture: str, result: Mapping[str, Any]) -> None:
    """Write the result next to the folder of the capture; do nothing if the capture has a URL.

    Raises ConfigError if the file cannot be written.
    """
    place = result_place(capture, result)
    if place is not None:
        write_output("--capture", place, json_text(result), private=True)


def stored_verdicts(places: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the file name and the verdict of each result next to these folders, oldest first.

    Results inside the folders are included: earlier versions of llmtap stored them there.
    """
    for place in places:
        if not Path(place).is_dir():
            continue
        folder = Path(place).resolve()
        in_parent = folder.parent.glob(f"{escape(folder.name)}.{RESULT_PATTERN}")
        paths = {
            path.name.removeprefix(f"{folder.name}."): path
            for path in (*folder.glob(RESULT_PATTERN), *in_parent)
        }
        for name, path in sorted(paths.items()):
            result = load_result(path)
            if result is not None:
                yield name, result["verdict"]
