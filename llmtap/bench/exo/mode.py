"""Run the exo-bench benchmark: a grid of prompt length, response length and concurrency, with repeats.

`cli/bench_exo.py` makes an `ExoBench` of options and an `ExoGrid`, also for `llmtap bench grid`; its `run`
returns an `ExoResult` (`result.py`). Each batch is sent as one replay. Connections are opened and bodies
prepared before the common start of a batch, from which `elapsed_s` counts. The requests of a batch share one
prompt; for `bench grid` each has its own. Without `--use-prefix-cache`, a field of the request switches the
cache off, or no two batches have a common prefix. A prompt (`Prompts`) is a short word repeated until the
text with the chat template has the wanted number of tokens.

Source: exo-bench's methodology, whole.
"""

import asyncio
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from llmtap import __version__
from llmtap.bench.exo.result import ExoCell, ExoResult, ExoRun, Made, Sent, Telling
from llmtap.bench.exo.server import (
    ExoCluster,
    ExoServed,
    Kind,
    NodeMetrics,
    PlacedInstance,
    PlacementWish,
    Power,
    ask_served,
    side_session,
    total_of,
)
from llmtap.bench.run.session import SessionWatcher
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.load.bodies import BodyOptions
from llmtap.load.monitor.system import is_loopback
from llmtap.load.monitor.watch import Watch
from llmtap.load.replay.options import ReplayOptions
from llmtap.load.replay.perform import Replay, ReplayStopped
from llmtap.load.replay.plan import ReplayPlan
from llmtap.load.sending import protocol_of, shown_url
from llmtap.units import NS_PER_S, Duration
from llmtap.workload.prompts.fitting import ATOM, Draft, fit
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import NAME_BYTES, Numbers
from llmtap.workload.prompts.tokenizer import OWN, TokenCounter, load_counter
from llmtap.workload.requests import Requests

CONCURRENCY_MAX: Final = 1_000
"""Number of connections that a replay opens before its start."""
TOKENS_MAX: Final = 10_000_000
"""Maximum length of a prompt or a response, to catch typing errors."""
_IN_A_ROW: Final = 8
_OURS: Final = "llmtap"


class ExoGrid(msgspec.Struct, frozen=True, kw_only=True):
    pp: list[int]
    """Tokens of the prompts, including the chat template."""
    tg: list[int]
    concurrency: list[int] = msgspec.field(default_factory=lambda: [1])
    repeat: int = 1
    warmup: int = 0
    """Unmeasured requests of the first pp and tg, sent one at a time before all others."""
    use_prefix_cache: bool = False
    distinct_prompts: bool = False
    """Each request of a batch has its own prompt; by default they share one (exo-bench, "Concurrency")."""

    def check(self) -> None:
        """Raise ConfigError with the name of a wrong option."""
        limits = (("--pp", self.pp, TOKENS_MAX), ("--tg", self.tg, TOKENS_MAX))
        for option, values, most in (*limits, ("--concurrency", self.concurrency, CONCURRENCY_MAX)):
            if not values:
                raise ConfigError(option, "is missing", f"such as {option} 512,4096")
            if min(values) < 1 or max(values) > most:
                raise ConfigError(option, f"expected numbers from 1 to {most:,}")
        if min(self.tg) < 2:
            raise ConfigError(
                "--tg", "1 has no rate: generation is timed from the first token to the last",
                "2 or more; the time to the first token alone is `llmtap bench ttft`",
            )  # fmt: skip

    def cells(self) -> list[ExoCell]:
        return [ExoCell(*point) for point in product(self.pp, self.tg, self.concurrency)]


class ExoOptions(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    model: str | None = None
    server: Kind = "auto"
    tokenizer: str | None = None
    headers: list[tuple[str, str]] = []
    """May contain keys, so they are in no result."""
    fields: dict[str, msgspec.Raw] = {}
    """Fields of each body; they replace llmtap's."""
    ca: str | None = None
    """CA certificate (PEM) to trust instead of the system's."""
    timeout: Duration = Duration(600 * NS_PER_S)
    placement: PlacementWish | None = None
    """exo only: how to place the model again; None: measure the present instance."""
    seed: int | None = None
    """Random seed of the first words of prompts; None: a new seed, so that no cache has the prompts."""


class Prompts:
    """Generator of prompts of exact length: new for each batch or request, or one per length."""

    def __init__(self, counter: TokenCounter, *, alike: bool, seed: int, distinct: bool = False) -> None:
        """`alike`: one prompt per length in all batches. `distinct`: one prompt per request of a batch."""
        self.alike = alike
        self.distinct = distinct
        self._counter = counter
        self._numbers = Numbers(seed)
        self._given = 0
        self._overhead = sum(counter.overhead(Prompt()))
        atom_is_a_token = counter.tokenizer.counts([ATOM.lstrip() + ATOM * (_IN_A_ROW - 1)]) == [_IN_A_ROW]
        self._atom = ATOM if atom_is_a_token else counter.words.separator + counter.words.table[0]
        self._known: dict[int, Made] = {}

    def smallest(self) -> int:
        """Return the tokens of a prompt of one word."""
        return fit([self._draft(1)], self._counter)[0][1].tokens

    def make(self, pp: int, n: int) -> list[Made]:
        """Return the prompts of a batch of `n` requests."""
        if self.alike:
            if pp not in self._known:
                self._known[pp] = fit([self._draft(pp)], self._counter)[0]
            return [self._known[pp]] * n
        made = n if self.distinct else 1
        first, self._given = self._given, self._given + made
        drafts = [self._draft(pp, number) for number in range(first, first + made)]
        return fit(drafts, self._counter) * (n // made)

    def _draft(self, pp: int, number: int = 0) -> Draft:
        def same(words: int) -> Prompt:
            return Prompt(text=self._atom.lstrip() + self._atom * (words - 1))

        def begun(words: int) -> Prompt:
            name = self._numbers.row(number, min(words, NAME_BYTES))
            return Prompt(text=self._counter.words.text(name) + self._atom * (words - len(name)))

        return Draft(pp, same if self.alike else begun, self._overhead)


class _PreparedPrompts:
    def __init__(self, made: Sequence[Made]) -> None:
        self._made = made

    def prompt(self, row: int) -> Prompt:
        return self._made[row][0]

    def prompts(self, rows: Sequence[int]) -> list[Made]:
        return [self._made[row] for row in rows]


class ExoBench:
    def __init__(
        self, options: ExoOptions, grid: ExoGrid, watcher: SessionWatcher, *, nvml: Any = None
    ) -> None:
        """`nvml` replaces the package pynvml in tests. Raises ConfigError."""
        self._options = options
        self._sending = ReplayOptions(
            target=options.target, headers=options.headers, ca=options.ca, timeout=options.timeout,
            connect_timeout=Duration(10 * NS_PER_S), scrape="none", texts=True,
        )  # fmt: skip
        self._tls = self._sending.tls()
        self._grid = grid
        self._watcher = watcher
        self._clock = SystemClock()
        self._nvml = nvml
        self._replay: Replay | None = None
        self._placing: asyncio.Task[PlacedInstance] | None = None
        self._sent_pp: set[int] = set()
        self.stopped = False

    def stop(self) -> None:
        """Discard the current batch and keep the earlier ones. A second call does not wait for responses."""
        self.stopped = True
        if self._placing is not None:
            self._placing.cancel()
        if self._replay is not None:
            self._replay.stop()

    async def run(self) -> ExoResult:
        options = self._options
        self._grid.check()
        if protocol_of(options.target) != "http":
            raise ConfigError("--target", "expected an http:// URL", "such as http://127.0.0.1:52415")
        counter = load_counter(options.tokenizer or OWN, chat=True, place="--tokenizer")
        served = await self._ask(options.model)
        if options.placement is None:
            return await self._measured(served, counter, None)
        if served.kind != "exo":
            raise ConfigError("--instance-meta", "only exo places models, and this server is another")
        async with side_session(options.headers, self._tls) as session:
            cluster = ExoCluster(session, served.url)
            self._watcher.step("placement", f"waiting for an instance of {served.model}")
            self._placing = asyncio.ensure_future(cluster.place(served.model, options.placement))
            try:
                placed = await self._placing
            except asyncio.CancelledError:
                raise LlmtapError("stopped while the model was placed") from None
            try:
                served = await self._ask(served.model, placed.id)
                return await self._measured(served, counter, placed)
            finally:
                await cluster.remove(placed)

    async def _ask(self, model: str | None, instance: str | None = None) -> ExoServed:
        options = self._options
        return await ask_served(
            options.target, options.headers, model=model, kind=options.server,
            use_prefix_cache=self._grid.use_prefix_cache, tls=self._tls, instance=instance,
        )  # fmt: skip

    async def _measured(
        self, served: ExoServed, counter: TokenCounter, placed: PlacedInstance | None
    ) -> ExoResult:
        options, grid = self._options, self._grid
        seed = secrets.randbits(32) if options.seed is None else options.seed
        alike = grid.use_prefix_cache or served.switches_cache
        prompts = Prompts(counter, alike=alike, seed=seed, distinct=grid.distinct_prompts)
        smallest = prompts.smallest()
        if min(grid.pp) < smallest:
            problem = (
                f"{min(grid.pp)} is too small: a prompt of one word has {smallest} tokens with its template"
            )
            raise ConfigError("--pp", problem, f"the smallest possible is {smallest}")
        watch = Watch(self._clock, served.url, scrape=False, nvml=self._nvml)
        nodes = None
        start_ns = self._clock.mono_ns()
        watch.start()
        if served.kind == "exo":
            nodes = NodeMetrics(self._clock, served.url, options.headers, self._tls)
        warm: list[Sent] = []
        sent: list[Sent] = []
        try:
            await self._measure(served, prompts, warm, sent)
        except ReplayStopped:
            pass
        finally:
            if nodes is not None:
                await nodes.close()
            series = await watch.close(start_ns)
        here = is_loopback(urlsplit(served.url).hostname or "")
        columns = {} if nodes is None else nodes.columns
        power = Power(series.system if here else None, columns)
        telling = Telling(served, power, start_ns, None if placed is None else placed.download_s)
        for one in warm:
            telling.runs(one)
        runs = [run for one in sent for run in telling.runs(one)]
        return ExoResult(
            runs=runs,
            cluster={
                "target": shown_url(served.url), "server": served.kind, "owned_by": served.owner,
                "model": served.listed, "state": served.state,
                "bench": {
                    "llmtap": __version__, **msgspec.structs.asdict(grid), "stopped": self.stopped,
                    "endpoint": served.endpoint, "stream": served.stream, "eos_banned_by": served.bans_eos,
                    "cache_switched_by_request": served.switches_cache, "prompts_alike": alike,
                    "seed": seed, "counted_by": counter.way,
                    "tokenizer": counter.tokenizer.name.rpartition("/")[2],
                    "notes": [*self._notes(served, here, placed), *dict.fromkeys(_seen(runs))],
                },
            },
            system_metrics={
                "local": {"server_is_here": here, **series.to_dict()},
                "nodes": {node: one.to_dict(start_ns) for node, one in columns.items()},
                "nodes_failed": None if nodes is None else nodes.failed,
                "energy": total_of(power.energy(*one.window_ns) for one in sent),
            },
        )  # fmt: skip

    async def _measure(self, served: ExoServed, prompts: Prompts, warm: list[Sent], sent: list[Sent]) -> None:
        cells, grid = self._grid.cells(), self._grid
        first = ExoCell(cells[0].pp, cells[0].tg, 1)
        for i in range(grid.warmup):
            self._watcher.step("warm-up", f"{first}, {i + 1:,} of {grid.warmup:,}")
            warm.append(await self._send(served, prompts, first, i))
        batches = len(cells) * grid.repeat
        for done, (cell, i) in enumerate(product(cells, range(grid.repeat))):
            self._watcher.left(f"{batches - done:,} of {batches:,} batches")
            self._watcher.step(str(cell), f"{i + 1:,} of {grid.repeat:,}")
            sent.append(await self._send(served, prompts, cell, i))

    async def _send(self, served: ExoServed, prompts: Prompts, cell: ExoCell, repeat: int) -> Sent:
        if self.stopped:
            raise ReplayStopped("stopped")
        n = cell.concurrency
        made = prompts.make(cell.pp, n)
        shared = n > 1 and (prompts.alike or not prompts.distinct)
        sent = Sent(cell, repeat, made, known=shared or (prompts.alike and cell.pp in self._sent_pp))
        self._sent_pp.add(cell.pp)
        # All of one arrival: they leave together, one after another as quickly as one process can.
        requests = Requests(array("q", bytes(8 * n)), array("q", [cell.pp] * n), array("q", [cell.tg] * n))
        self._replay = Replay(
            ReplayPlan(requests, _PreparedPrompts(made), {"bench": "exo", "requests": n}),
            msgspec.structs.replace(
                self._sending, target=served.url, endpoint=served.endpoint, model=served.model
            ),
            BodyOptions(
                server="auto" if served.kind == "exo" else served.kind, model=served.model,
                stream=served.stream, min_tokens=True, temperature=0.0,
                fields={**served.fields, **self._options.fields},
            ),
            self._watcher,
            keeping=sent.keep,
        )  # fmt: skip
        try:
            result = await self._replay.run()
        finally:
            self._replay = None
        if self.stopped:
            raise ReplayStopped("stopped")
        sent.findings += result["verdict"]["findings"]
        return sent

    def _notes(self, served: ExoServed, here: bool, placed: PlacedInstance | None) -> Iterator[str]:
        if placed is not None and placed.others:
            yield f"{placed.others:,} other placements of the model fit the options and were not measured"
        if self.stopped:
            yield "it was stopped: the grid is not complete"
        if served.bans_eos is None:
            yield "answers may end early: how this server is told to ban EOS is not known (--server)"
        if not served.switches_cache and not self._grid.use_prefix_cache:
            yield "the prefix cache is not switched off: each prompt begins with words of its own instead"
        if self._options.tokenizer is None and served.owner != _OURS:
            yield "prompts were counted by llmtap's own tokenizer: --tokenizer makes them exact"
        if served.kind != "exo" and not here:
            yield "the server is not on this host: its power and memory are not known"


def _seen(runs: Iterable[ExoRun]) -> Iterator[str]:
    """Yield notes on lengths that differ from the requested ones."""
    for run in runs:
        told, made = run.stats.prompt_tokens, run.stats.generation_tokens
        if run.pp_tokens != run.pp:
            yield f"pp {run.pp:,} could not be met: its prompts have {run.pp_tokens:,} tokens"
        if told is not None and told != run.pp_tokens:
            yield f"the server counts {told:,} tokens in prompts of {run.pp_tokens:,}"
        if run.outcome == "complete" and made != run.tg:
            yield f"not all answers of tg {run.tg:,} have as many tokens: see generation_tokens"
