"""What is looked at before anything is sent, and what is taken away again where nothing was.

A workload or an arrival process that there is not, and a server that does not answer, are told before a
folder says that something was measured.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from llmtap.bench.run.folder import Folder
from llmtap.bench.run.session import BASELINE, BenchSession
from llmtap.bench.run.test import BenchTest
from llmtap.errors import ConfigError
from llmtap.load.replay.plan import AT_ONCE
from llmtap.workload.arrivals import OWN_RATES, parse_arrivals
from llmtap.workload.registry import is_workload, workload_named

__all__ = ["check_values", "undo", "unreached"]


def check_values(test: BenchTest[Any], params: msgspec.Struct) -> None:
    """Raises ConfigError of a workload or an arrival process that there is not."""
    workload, arrivals = getattr(params, "workload", None), getattr(params, "arrivals", None)
    key = f"tests.{test.name}"
    if workload is not None:
        _check_workload(workload, f"{key}.workload")
    if arrivals is not None and arrivals != AT_ONCE:
        own = arrivals.partition(":")[0].strip() in OWN_RATES
        parse_arrivals(arrivals, rate_rps=None if own else 1.0, seed=0, place=f"{key}.arrivals")


def _check_workload(text: str, place: str) -> None:
    if text.endswith(".toml"):
        if not Path(text).is_file():
            raise ConfigError(place, f"there is no file {text}")
    elif not is_workload(text) and "://" not in text and not Path(text).exists():
        workload_named(text, place)


async def unreached(tests: Sequence[tuple[BenchTest[Any], BenchSession]]) -> Mapping[str, ConfigError]:
    """By test, why its server can't be asked. What a command switches over may not be there yet: it is not
    looked for."""
    known: dict[str, ConfigError | None] = {}
    found: dict[str, ConfigError] = {}
    for test, session in tests:
        arms = [name for name in (*test.arms, *test.arms_any) if name in session.arms]
        if any(session.arms[name].switches for name in arms):
            continue
        for name in arms or [BASELINE]:
            url = (session.arms[name].url if name else None) or session.target.url
            if url not in known:
                known[url] = await _why_not(session, name)
            why = known[url]
            if why is not None:
                found[test.name] = why
    return found


async def _why_not(session: BenchSession, arm: str) -> ConfigError | None:
    try:
        await session.reach(arm)
    except ConfigError as exc:
        own = exc.place == "--target" and arm and session.arms[arm].url
        return ConfigError(f"[arms.{arm}] url", exc.problem, exc.hint) if own else exc
    return None


def undo(folder: Folder, made: Sequence[str], asked: tuple[Path, bytes | None]) -> None:
    """The results folder as it was before.

    Args:
        made: folders in it that were not there.
        asked: the file that says what was asked, and what was in it; None: it was not there.
    """
    for name in made:
        shutil.rmtree(folder.path / name, ignore_errors=True)
    file, before = asked
    if before is None:
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(before)
    folder.unmake()
