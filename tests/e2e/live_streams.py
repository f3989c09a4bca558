"""A thousand live streams, and the tap between them is stopped, reloaded, replaced and started anew.

    .venv/bin/python tests/e2e/live_streams.py                  all four, about 100 s
    .venv/bin/python tests/e2e/live_streams.py --only SIGUSR2   one of them; --streams N for fewer or more

For each act a tap of two workers, with a capture, holds `--streams` streams of known bytes while new clients
come all the time. When every stream runs, the act: SIGTERM; SIGHUP with another configuration; SIGUSR2, the
hot restart; and what `systemctl restart` does to sockets that systemd holds, only harder: the next tap starts
while the last one still lets its streams end.

Exits 1 if a stream does not arrive whole, byte for byte; if a client is refused or its answer cut (after
SIGTERM nobody else comes); or if the counts differ: what relays say they opened, measured and did not
measure, what was asked, and what lies in the capture. Everything is on loopback; what is started is ended by
its process id.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
import urllib.error
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from parts.live_traffic import (
    FILES_NEEDED,
    Newcomers,
    Stream,
    all_over,
    listening,
    open_files_raised,
    open_streams,
)
from parts.servers import Failure, get_json, port_free, tail

import llmtap

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ROOT = REPOSITORY / ".e2e/live"

EVENTS = 32
EVERY_S = 0.5
NEWCOMER_EVERY_S = 0.05
AFTER_S = 2.0  # newcomers go on for so long after the streams have ended
READY_S_MAX = 60.0
SETTLED_S_MAX = 30.0
DONE_S_MAX = 60.0
LOOK_S = 0.25
END_S_MAX = 90.0
DRAIN_S = 60
WORKERS = 2

ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 100)
os.dup2(int(sys.argv[2]), 101)
os.dup2(100, 3, inheritable=True)
os.dup2(101, 4, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="listen:admin")
os.execv(sys.argv[3], sys.argv[3:])
"""
"""File descriptors as an init system leaves them to a service: from 3 on, with their names."""


class Tap:
    """A running `llmtap proxy`."""

    def __init__(self, name: str, upstream: int) -> None:
        self.name = name
        self.kept = ROOT / name
        self.log = ROOT / f"{name}.log"
        self.config = ROOT / f"{name}.toml"
        self.listen = self.admin = 0
        self._upstream = upstream
        self._process: asyncio.subprocess.Process | None = None

    def configure(self, idle_timeout_s: int) -> None:
        self.config.write_text(
            f'[relay]\nupstream = "http://127.0.0.1:{self._upstream}"\nworkers = {WORKERS}\n'
            f'drain_timeout = "{DRAIN_S}s"\nidle_timeout = "{idle_timeout_s}s"\n'
            f'[capture]\nto = "{self.kept}"\n[log]\nlevel = "warning"\n'
        )

    async def start(self, handed: tuple[Any, Any] | None = None) -> None:
        """On ports of its own, or on sockets that are `handed` to it."""
        self.configure(300)
        program = [sys.executable, "-m", "llmtap.cli", "proxy", "--config", str(self.config)]
        fds: tuple[int, ...] = ()
        if handed is None:
            self.listen, self.admin = port_free(), port_free()
            program += ["--listen", f"127.0.0.1:{self.listen}", "--admin", f"127.0.0.1:{self.admin}"]
        else:
            self.listen, self.admin = (sock.getsockname()[1] for sock in handed)
            fds = tuple(sock.fileno() for sock in handed)
            program = [sys.executable, "-c", ACTIVATE, *map(str, fds), *program]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LLMTAP_")}
        with self.log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *program, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
                env=clean | {"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY, pass_fds=fds,
            )  # fmt: skip

    async def ready(self) -> None:
        """Until so many relays as there are workers have told of themselves."""
        await self.until(lambda told: len(speaking(told)) >= WORKERS, READY_S_MAX, "was not ready")

    async def until(self, true: Callable[[dict[str, Any]], bool], limit_s: float, else_it: str) -> Any:
        """What the admin API says, once that is true of it."""
        give_up = time.monotonic() + limit_s
        told: dict[str, Any] = {}
        while time.monotonic() < give_up:
            assert self._process is not None
            if self._process.returncode is not None:
                raise Failure(f"{self.name} ended with {self._process.returncode}\n{tail(self.log)}")
            with contextlib.suppress(OSError, urllib.error.URLError, ValueError):
                url = f"http://127.0.0.1:{self.admin}/api/v1/summary?window=all&by=none"
                told = await asyncio.to_thread(get_json, url)
                if true(told):
                    return told
            await asyncio.sleep(LOOK_S)
        raise Failure(f"{self.name} {else_it} in {limit_s:.0f} s: {told.get('relays')}\n{tail(self.log)}")

    async def relays(self) -> set[int]:
        """The process ids of those that speak."""
        told = await self.until(lambda told: bool(speaking(told)), SETTLED_S_MAX, "said nothing of relays")
        return {relay["pid"] for relay in speaking(told)}

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def ended(self) -> int:
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), END_S_MAX)

    async def kill(self) -> None:
        """What an act that failed has left; relays and meter see it, and end by themselves."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def speaking(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for r in told.get("relays", {}).values() if r["connected"] and "opened" in r]


def settled(told: dict[str, Any], asked: int) -> bool:
    """All that was asked was opened by some relay, and has become one thing."""
    relays = [r for r in told.get("relays", {}).values() if "opened" in r]
    return sum(r["opened"] for r in relays) == asked and all(
        r["opened"] == r["measured"] + sum(r["dropped"].values()) + r["lost"] for r in relays
    )


@dataclass
class Result:
    """One act, and what came of it."""

    act: str
    streams: list[Stream] = field(default_factory=list)
    newcomers: list[Stream] = field(default_factory=list)
    live: int = 0
    """Streams that ran at the moment of the act."""
    live_then: int | None = None
    """And when it was done: when those that follow were ready. None where nobody follows."""
    measured: int = 0
    unmeasured: int = 0
    captured: int = 0
    took_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def asked(self) -> int:
        return len(self.streams) + len(self.newcomers)

    def count(self, told: dict[str, Any]) -> None:
        """Of a tap that still runs."""
        for relay in told["relays"].values():
            self.measured += relay["measured"]
            self.unmeasured += sum(relay["dropped"].values()) + relay["lost"]

    def look_at(self, *kept: Path, counted: bool) -> None:
        """What the captures say; without `counted`, nobody else could be asked."""
        missing = 0
        for folder in kept:
            capture = llmtap.read(str(folder))
            integrity = capture.integrity()
            self.captured += capture.table(columns=["seq"]).num_rows
            missing += sum(c.missing for c in integrity.captures)
            if not integrity.ok:
                self.wrong.append(
                    f"{folder.name}: the capture's numbers do not add up: {integrity.to_dict()}"
                )
        if not counted:
            self.measured, self.unmeasured = self.captured, missing
        if self.measured + self.unmeasured != self.asked:
            self.wrong.append(f"asked {self.asked}, measured {self.measured}, not {self.unmeasured}")
        if self.captured != self.measured:
            self.wrong.append(f"measured {self.measured}, captured {self.captured}")

    def judge(self, n: int) -> None:
        if self.live != n:
            self.wrong.append(f"only {self.live} of {n} streams ran at the moment of the act")
        if self.live_then == 0:
            self.wrong.append(
                "the streams were over before it was done: this machine is too slow for so many"
            )
        for what, asked in (("stream", self.streams), ("newcomer", self.newcomers)):
            broken = [x for x in asked if x.problem is not None]
            self.wrong += [f"{what} {x.name}: {x.problem}" for x in broken[:3]]
            if broken[3:]:
                self.wrong.append(f"and {len(broken) - 3} more of {what}s")


class Play:
    """The acts, on one server."""

    def __init__(self, upstream: int, streams: int) -> None:
        self._upstream = upstream
        self._n = streams
        self._taps: list[Tap] = []

    async def run(self, act: str) -> Result:
        acts: dict[str, Callable[[Result], Awaitable[None]]] = {
            "SIGTERM": self._stop,
            "SIGHUP": self._reload,
            "SIGUSR2": self._hot_restart,
            "activation": self._activation,
        }
        result = Result(act)
        began = time.monotonic()
        try:
            await acts[act](result)
            result.judge(self._n)
        except (Failure, TimeoutError) as exc:
            result.wrong.append(str(exc) or "something took too long")
        finally:
            for tap in self._taps:
                await tap.kill()
        result.took_s = time.monotonic() - began
        return result

    def _tap(self, name: str) -> Tap:
        tap = Tap(name, self._upstream)
        self._taps.append(tap)
        return tap

    async def _streams(self, tap: Tap, result: Result) -> Newcomers:
        """All of them run, and newcomers come."""
        newcomers = Newcomers(tap.listen, NEWCOMER_EVERY_S, "n")
        result.newcomers = newcomers.asked
        newcomers.start()
        result.streams = await open_streams(tap.listen, self._n, EVENTS, EVERY_S, "s")
        result.live = sum(stream.live for stream in result.streams)
        return newcomers

    async def _followed(self, tap: Tap, before: set[int], result: Result) -> None:
        """Until relays that were not there before speak to the meter that answers."""

        def there(told: dict[str, Any]) -> bool:
            return len({relay["pid"] for relay in speaking(told)} - before) >= WORKERS

        await tap.until(there, DONE_S_MAX, "was not done")
        result.live_then = sum(stream.live for stream in result.streams)

    async def _finish(self, newcomers: Newcomers, result: Result) -> None:
        await all_over(result.streams)
        await asyncio.sleep(AFTER_S)
        newcomers.stop()
        await all_over(result.newcomers)

    async def _end(self, tap: Tap, result: Result) -> None:
        tap.signal(signal.SIGTERM)
        status = await tap.ended()
        if status != 0:
            result.wrong.append(f"{tap.name} ended with {status}\n{tail(tap.log)}")

    async def _stop(self, result: Result) -> None:
        tap = self._tap("sigterm")
        await tap.start()
        await tap.ready()
        newcomers = await self._streams(tap, result)
        newcomers.stop()
        await self._end(tap, result)
        await all_over(result.streams + result.newcomers)
        result.look_at(tap.kept, counted=False)

    async def _reload(self, result: Result) -> None:
        await self._change(self._tap("sighup"), signal.SIGHUP, result)

    async def _hot_restart(self, result: Result) -> None:
        await self._change(self._tap("sigusr2"), signal.SIGUSR2, result)

    async def _change(self, tap: Tap, number: signal.Signals, result: Result) -> None:
        await tap.start()
        await tap.ready()
        newcomers = await self._streams(tap, result)
        before = await tap.relays()
        tap.configure(299)
        tap.signal(number)
        await self._followed(tap, before, result)
        await self._finish(newcomers, result)
        told = await tap.until(lambda told: settled(told, result.asked), SETTLED_S_MAX, "did not settle")
        result.count(told)
        await self._end(tap, result)
        result.look_at(tap.kept, counted=True)

    async def _activation(self, result: Result) -> None:
        first, second = self._tap("activated-1"), self._tap("activated-2")
        with listening() as clients, listening() as admin:
            await first.start((clients, admin))
            await first.ready()
            newcomers = await self._streams(first, result)
            before = await first.relays()
            first.signal(signal.SIGTERM)
            await second.start((clients, admin))
            await self._followed(second, before, result)
            await self._finish(newcomers, result)
            if await first.ended() != 0:
                result.wrong.append(f"the first one did not end well\n{tail(first.log)}")
            await self._end(second, result)
        result.look_at(first.kept, second.kept, counted=False)


COLUMNS = (
    "act       ", "streams", "then", "whole", "newcomers", "whole", "refused", "slowest s",
    "asked", "measured", "not", "captured", "took s",
)  # fmt: skip


def show(results: list[Result]) -> None:
    """The table, and what is wrong below it."""
    print("\n" + "  ".join(COLUMNS))
    for r in results:
        answered = [x for x in r.newcomers if x.problem is None]
        cells = (
            r.act, r.live, "-" if r.live_then is None else r.live_then,
            sum(x.problem is None for x in r.streams), len(r.newcomers), len(answered),
            sum(x.problem == "refused" for x in r.newcomers),
            f"{max((x.ended - x.began for x in answered), default=0.0):.2f}",
            r.asked, r.measured, r.unmeasured, r.captured, f"{r.took_s:.1f}",
        )  # fmt: skip
        print("  ".join(f"{cell!s:>{len(name)}}" for cell, name in zip(cells, COLUMNS, strict=True)))
    for r in results:
        for wrong in r.wrong:
            print(f"{r.act}: {wrong}")
    print("ok" if not any(r.wrong for r in results) else "FAILED")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    acts = ("SIGTERM", "SIGHUP", "SIGUSR2", "activation")
    parser.add_argument("--only", choices=acts, help="one act")
    parser.add_argument("--streams", type=int, default=1_000)
    options = parser.parse_args()
    files = open_files_raised()
    if files < FILES_NEEDED * max(1, options.streams // 1_000):
        print(f"the hard limit on open files is {files}: too few for {options.streams} streams")
        return 1
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "parts" / "live_traffic.py"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        results = []
        for act in (options.only,) if options.only else acts:
            print(f"{act} ...", flush=True)
            results.append(await Play(port, options.streams).run(act))
    finally:
        server.kill()
        await server.wait()
    show(results)
    return 1 if any(r.wrong for r in results) else 0


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
