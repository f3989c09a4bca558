"""What a results folder holds of a test from before.

Measured with the same parameters it is gone on with. Measured with others it is another measurement, which
is not replaced unless somebody says so (`--again`): a day's work may lie there. TEST/asked.json has what all
runs of a test were measured with, without keys; where a folder lacks it, the first run's report tells.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.bench.run.folder import RESULT, Folder
from llmtap.bench.run.session import BenchSession
from llmtap.bench.run.test import BenchTest
from llmtap.bench.sut.file import params_told, without_keys
from llmtap.errors import ConfigError

__all__ = ["asked_of", "begin", "clear", "declared_otherwise", "refuse_other"]

ASKED: Final = "asked.json"
SHOWN_MAX: Final = 3
"""Of the parameters that differ."""
_PARTS: Final = ("quick", "params", "target", "arms", "seed", "warmup", "hidden")
"""That change what is measured, in the order in which they are told."""
_NOTHING: Final[tuple[object, ...]] = (None, "", [])
_NAMES: Final = {"quick": "--quick", "seed": "--seed", "warmup": "--warmup", "hidden": "a key or a query"}


def asked_of(test: BenchTest[Any], params: msgspec.Struct, session: BenchSession) -> dict[str, Any]:
    """What the runs of a test are measured with, as JSON: `quick`, `seed` (of the first run), `warmup`,
    `target`, `arms` (those that it compares), `params`, `hidden` (a digest that tells what is not shown of
    target and arms from another) and `sut`, which is declared and changes nothing."""
    arms = {name: arm for name, arm in session.arms.items() if name in _arms_of(test)}
    hidden = msgspec.json.encode([session.target, arms], order="sorted")
    told = {
        "quick": session.quick, "seed": session.seed, "warmup": session.warmup,
        "target": without_keys(session.target),
        "arms": {name: without_keys(arm) for name, arm in arms.items()},
        "params": params_told(params), "hidden": hashlib.sha256(hidden).hexdigest()[:16],
        "sut": msgspec.to_builtins(session.sut),
    }  # fmt: skip
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
    return decoded


def refuse_other(folder: Folder, test: BenchTest[Any], asked: Mapping[str, Any]) -> None:
    """Raises ConfigError where the test's folder holds loads that were measured with other parameters."""
    before = _before(folder, test)
    differing = [] if before is None else list(_differing(before, asked))
    if not differing:
        return
    told = "; ".join(
        f"{name} {_shown(was)} there, {_shown(now)} now" for name, was, now in differing[:SHOWN_MAX]
    )
    more = f"; and {len(differing) - SHOWN_MAX} more" if len(differing) > SHOWN_MAX else ""
    raise ConfigError(
        "--results",
        f"{folder.path} was measured with other parameters: {told}{more}",
        "another --results, or --again to measure it anew there, in place of what is",
    )


def declared_otherwise(folder: Folder, test: BenchTest[Any], asked: Mapping[str, Any]) -> list[str]:
    """What the SUT was declared to be when the folder's loads were measured, where that is something else
    now: `sut.model "a" there, "b" now`. What nobody declared, then or now, is no other declaration."""
    before = _before(folder, test) or {}
    was, now = (dict(_leaves(told.get("sut") or {}, "sut.")) for told in (before, asked))
    return [
        f"{name} {_shown(value)} there, {_shown(now.get(name))} now"
        for name, value in was.items()
        if value not in _NOTHING and now.get(name) not in (*_NOTHING, value)
    ]


def begin(folder: Folder, asked: Mapping[str, Any]) -> None:
    """Keeps what is asked now."""
    folder.write_json(ASKED, asked)


def clear(folder: Path) -> None:
    """All that is there of a test, every run of it."""
    shutil.rmtree(folder, ignore_errors=True)


def _before(folder: Folder, test: BenchTest[Any]) -> dict[str, Any] | None:
    """What whole loads in a test's folder were measured with; None without any, or where nothing tells."""
    report = folder.read_json(RESULT)
    whole = (at for at in folder.path.rglob("step.json") if ".unfinished/" not in at.as_posix())
    if report is None and next(whole, None) is None:
        return None
    asked: dict[str, Any] | None = folder.read_json(ASKED)
    if asked is not None or report is None:
        return asked
    arms = {name: arm for name, arm in (report.get("arms") or {}).items() if name in _arms_of(test)}
    return {**report, "arms": arms}


def _arms_of(test: BenchTest[Any]) -> tuple[str, ...]:
    return (*test.arms, *test.arms_any)


def _differing(before: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value there, value now."""
    shown = False
    for part in _PARTS:
        if part not in before or (part == "hidden" and shown):
            continue
        was, now = before[part], asked[part]
        if not isinstance(was, Mapping):
            if was != now:
                yield _NAMES[part], was, now
            continue
        if part == "params":  # a version between may have brought one, with its default
            now = {name: value for name, value in now.items() if name in was}
        place = "" if part == "params" else f"{part}."
        ours, theirs = dict(_leaves(now, place)), dict(_leaves(was, place))
        for name in dict.fromkeys((*theirs, *ours)):
            if ours.get(name) != theirs.get(name):
                shown |= part in ("target", "arms")
                yield name, theirs.get(name), ours.get(name)


def _leaves(tree: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for name, held in tree.items():
        if isinstance(held, Mapping):
            yield from _leaves(held, f"{place}{name}.")
        else:
            yield f"{place}{name}", held


def _shown(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()
