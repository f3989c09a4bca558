"""A replay's result for whoever wants it: the terminal, JSON, Markdown, a page; and read again from its file.

`llmtap replay` and `llmtap report RESULT` tell the same. In the folder of a capture its replay leaves the
result, too, so that `llmtap report` of the capture knows whether its figures may be believed.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llmtap.cli.outputs import STDOUT, need_outputs, write_output

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Outputs", "load_result", "verdicts_beside", "write_beside"]

RESULT_BYTES_MAX: Final = 256 << 20
"""A result has some MB: a value for each second and series."""
BESIDE: Final = "replay-*.json"
"""Of a capture's folder. Captures are `llmtap-*`; nobody takes this for one."""


class Outputs:
    """Where a result is wanted. Making it raises ConfigError of an option that cannot be obeyed."""

    def __init__(self, *, json: str | None, html: str | None, markdown: str | None) -> None:
        self._files = need_outputs(json=json, html=html, markdown=markdown)
        named = {"--json": json, "--html": html, "--markdown": markdown}
        self._stdout = next((option for option, name in named.items() if name == STDOUT), None)

    def tell(self, result: Mapping[str, Any]) -> None:
        """Writes the files, and prints what goes to stdout: the tables where nothing else does."""
        for option, place in self._files.items():
            write_output(option, place, _text(option, result))
        if self._stdout is not None:
            print(_text(self._stdout, result))
            return
        from llmtap.report.replay import render_replay

        _print(render_replay(result))


class _Marks(msgspec.Struct):
    """What a replay's result has, and hardly anything else."""

    load: dict[str, msgspec.Raw]
    sender: dict[str, msgspec.Raw]
    plan: dict[str, msgspec.Raw]
    metrics: dict[str, msgspec.Raw]
    verdict: dict[str, msgspec.Raw]


def load_result(place: str | Path) -> dict[str, Any] | None:
    """The result that `llmtap replay --json` wrote there; None where that is something else."""
    path = Path(place)
    try:
        if not path.is_file() or path.stat().st_size > RESULT_BYTES_MAX:
            return None
        with path.open("rb") as file:
            begin = file.read(64)
            if not begin.lstrip().startswith(b"{"):
                return None
            raw = begin + file.read()
        msgspec.json.decode(raw, type=_Marks)
        result: dict[str, Any] = msgspec.json.decode(raw)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    return result


def write_beside(capture: str, result: Mapping[str, Any]) -> None:
    """Leaves the result in the capture's folder, where that is a local one.

    Raises ConfigError where it cannot be written.
    """
    from llmtap.capture.store.places import open_place

    folder = open_place(capture).folder
    if folder is not None:
        when = re.sub(r"\W", "", str(result["window"]["start"]))
        write_output("--capture", folder / BESIDE.replace("*", when), _json(result))


def verdicts_beside(places: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and verdicts of the results that lie in these folders, the oldest first."""
    for place in places:
        for path in sorted(Path(place).glob(BESIDE)) if Path(place).is_dir() else ():
            result = load_result(path)
            if result is not None:
                yield path.name, result["verdict"]


def _text(option: str, result: Mapping[str, Any]) -> str:
    """What an option asks for."""
    match option:
        case "--html":
            from llmtap.report.replay import replay_html

            return replay_html(result)
        case "--markdown":
            from llmtap.report.replay import replay_markdown

            return replay_markdown(result)
    return _json(result)


def _json(result: Mapping[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(result)).decode()


def _print(shown: "RenderableType") -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
    else:  # for grep: a line is a line
        Console(highlight=False, width=200).print(shown, soft_wrap=True)
