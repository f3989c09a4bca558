"""SIGKILL of meter, relay and supervisor at random moments of a capture: what is in the files afterwards.

Invariant: an exchange that ended more than a second before a kill is in the files, once; what is missing
shows as gaps in the relays' numbers, and no file is unreadable. Four proxies die seven times each.
"""

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import llmtap
from tests.proxy.capturing import Asked, Load, Process, streams
from tests.proxy.starving import Starving
from tests.support.servers.live_proxy import READY_S
from tests.support.servers.peer import play
from tests.support.servers.upstream import upstream
from tests.support.waiting import wait_until

LIMIT_S = 800
# The first test waits for all proxies: a minute or two here.
pytestmark = [pytest.mark.realtime, pytest.mark.timeout(LIMIT_S + 60)]

CHAT = "/v1/chat/completions"
SEEDS = range(4)
ROLES = ("meter", "meter", "relay", "meter", "meter", "meter", "supervisor")
AT_ONCE = 4
WORKERS = 2
CLIENTS = 3
BEFORE_S = 1.0
"""What the issue promises: what ended this long before a kill is kept."""


@dataclass
class Trial:
    """One proxy's life, and deaths."""

    folder: Path
    asked: list[Asked] = field(default_factory=list)
    away: list[tuple[float, float]] = field(default_factory=list)
    """From a kill until all relays spoke to a meter again."""
    starved_s: list[float] = field(default_factory=list)
    """What the processes were kept waiting for a CPU, shortly before each kill."""


async def one(trial: Trial, url: str, seed: int) -> None:
    rng = random.Random(seed)
    settings = (f"relay.workers={WORKERS}", "capture.rotate_every=2s")
    process = Process(url, str(trial.folder), *settings)
    starving = Starving(lambda: family(process))
    watching = asyncio.create_task(starving.watch())
    try:
        await process.start(WORKERS)
        load = Load(process.ports.listen, f"s{seed}", trial.asked)
        clients = [asyncio.create_task(load.client()) for _ in range(CLIENTS)]
        for role in ROLES:
            await asyncio.sleep(rng.uniform(0.2, 2.2))
            trial.starved_s.append(starving.lately_s())
            killed = time.monotonic()
            pids = process.kill(role)
            if role == "supervisor":
                # Relays and meter drain and end; a new proxy takes the folder over.
                await process.gone()
                orphan, process = process, Process(url, str(trial.folder), *settings)
                await until_gone(orphan)
                orphan.close()
                await process.start(WORKERS)
                load.port = process.ports.listen
            else:
                await process.without(pids)
                await process.ready(WORKERS)
            trial.away.append((killed, time.monotonic()))
        await asyncio.sleep(1.5)
        load.stopping = True
        await asyncio.gather(*clients)
        await asyncio.sleep(0.5)
        assert await process.stop() == 0, process.log()
    finally:
        watching.cancel()
        process.close()


def family(process: Process) -> list[int]:
    """Its meter and its relays, as far as they run."""
    with contextlib.suppress(OSError, AssertionError):
        return [*process.children("meter"), *process.children("relay")]
    return []


async def until_gone(process: Process) -> None:
    """Until nothing of its group is left."""
    await wait_until(lambda: process.pid not in groups(), READY_S)


def groups() -> set[int]:
    """The process groups there are."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found.add(int(stat.read_text().rpartition(")")[2].split()[2]))
    return found


async def all_of_them(folder: Path) -> list[Trial]:
    trials = [Trial(folder / str(seed)) for seed in SEEDS]
    turns = asyncio.Semaphore(AT_ONCE)

    async def take(trial: Trial, seed: int) -> None:
        async with turns:
            await one(trial, gateway.url, seed)

    async with upstream() as gateway:
        gateway.at(CHAT, streams(tokens=3, gap_s=0.03))
        async with asyncio.TaskGroup() as group:
            for seed, trial in zip(SEEDS, trials, strict=True):
                group.create_task(take(trial, seed))
    return trials


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
    return list(play(all_of_them(tmp_path_factory.mktemp("captures")), limit_s=LIMIT_S))


def test_every_kill_came_under_a_load_worth_the_name(trials: list[Trial]) -> None:
    assert [len(trial.away) for trial in trials] == [len(ROLES)] * len(SEEDS)
    assert all(sum(a.whole for a in trial.asked) > 100 for trial in trials)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_ended_a_second_before_a_kill_is_kept(trials: list[Trial], seed: int) -> None:
    trial = trials[seed]
    kept = [row["request_id"] for row in rows(trial)]
    assert len(kept) == len(set(kept)), "an exchange was written twice"
    due = [a for a in trial.asked if a.whole and not touches(a, trial)]
    assert len(due) > 20 or max(trial.starved_s) > BEFORE_S, trial.starved_s
    lost = [a for a in due if a.id not in set(kept)]
    assert not lost, (f"seed {seed}", lost, trial.away, trial.starved_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_missing_is_counted(trials: list[Trial], seed: int) -> None:
    """Numbers without gaps: each relay's rows and the numbers missing between them are all it opened."""
    trial = trials[seed]
    captures = llmtap.read(trial.folder).integrity().captures
    assert len(captures) == 2, "one before the supervisor was killed, one after"
    assert not any(capture.duplicates for capture in captures)
    present = sum(capture.present for capture in captures)
    missing = sum(capture.missing for capture in captures)
    assert present == len(rows(trial))
    assert captures[1].closed and captures[1].missing == 0, "nobody was killed any more"
    # Clients know of no exchange that is neither kept nor counted as missing, but for those whose numbers
    # a killed relay took with it: those of its last 10 ms, and those that nobody was there to be told of.
    whole = sum(a.whole for a in trial.asked)
    assert whole <= present + missing + CLIENTS * ROLES.count("relay"), (whole, present, missing)


def touches(asked: Asked, trial: Trial) -> bool:
    """It was under way while somebody was away, or ended so shortly before that it may be lost."""
    return any(
        asked.began <= back and asked.ended + BEFORE_S + starved_s >= killed
        for (killed, back), starved_s in zip(trial.away, trial.starved_s, strict=True)
    )


def rows(trial: Trial) -> list[dict[str, object]]:
    table = llmtap.read(trial.folder).table(columns=["request_id", "relay", "seq"])
    found: list[dict[str, object]] = table.to_pylist()
    return found
