"""Run the exo-bench benchmark: a grid of prompt length, response length and concurrency, with repeats.

`cli/bench_exo.py` makes an `ExoBench` of options and an `ExoGrid`, also for `llmtap bench grid`; its `run`
returns an `ExoResult` (`result.py`). Each batch is sent as one replay. Connections are opened and bodies
prepared before the common start of a batch, from which `elapsed_s` counts. Without `--use-prefix-cache`, a
field of the request switches the cache off. If the server has no such field, no two prompts have a common
prefix, so that the cache has no effect. The requests of a batch share one prompt only if the cache is
switched off, or is used on purpose. A prompt (`Prompts`) is a short word, repeated until the text with the
chat template has the requested number of tokens.

Source: the whole of exo-bench's methodology.
"""

import asyncio
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from llmtap.bench.exo.result import (
    ExoCell,
    ExoResult,
    ExoRun,
    RunBuilder,
    SentBatch,
    SizedPrompt,
    SystemMetrics,
)
from llmtap.bench.exo.server import (
    ExoCluster,
    ExoServer,
    Kind,
    NodeMetrics,
    PlacedInstance,
    PlacementFilter,
    Power,
    detect_server,
    side_session,
    total_of,
)
from llmtap.bench.run.session import SessionWatcher
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.load.monitor.system import is_loopback
from llmtap.load.monitor.watch import LoadMonitor
from llmtap.load.options import BodyOptions, LoadPlan
from llmtap.load.replay.findings import JudgedFinding
from llmtap.load.replay.perform import Replay, ReplayStopped
from llmtap.load.replay.plan import ReplayPlan
from llmtap.load.sending import protocol_of, shown_url
from llmtap.units import NS_PER_S, Duration
from llmtap.version import __version__
from llmtap.workload.prompts.fitting import ATOM, Draft, fit
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import NAME_BYTES, NumberedBytes
from llmtap.workload.prompts.tokenizer import OWN, TokenCounter, load_counter
from llmtap.workload.requests import Requests

CONCURRENCY_MAX: Final = 1_000
"""Maximum concurrency: a replay opens at most this number of connections before it starts to send."""
TOKENS_MAX: Final = 10_000_000
"""Maximum length of a prompt or a response, to catch typing errors."""
_ATOM_TEST_COUNT: Final = 8
_LLMTAP_OWNER: Final = "llmtap"


class ExoGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Grid of prompt lengths, response lengths and concurrencies to measure."""

    pp: list[int]
    """Prompt lengths in tokens, including the chat template (exo-bench: prompt processing)."""
    tg: list[int]
    """Response lengths in tokens (exo-bench: token generation)."""
    concurrency: list[int] = msgspec.field(default_factory=lambda: [1])
    """Numbers of requests in a batch."""
    repeat: int = 1
    """Number of batches of each cell of the grid."""
    warmup: int = 0
    """Number of unmeasured requests with the first `pp` and `tg`, sent one at a time before all batches."""
    use_prefix_cache: bool = False
    """Whether the server may answer a prompt from its prefix cache."""
    distinct_prompts: bool = False
    """Give each request of a batch its own prompt, even if a request field switches the prefix cache off.
    False: if the server has such a field, requests of a batch share one prompt (exo-bench, "Concurrency").
    Without effect if `use_prefix_cache` is True: then the requests of a batch always share one prompt."""

    def check(self) -> None:
        """Raise ConfigError, which names the option, if a value is missing or outside its limits."""
        limits = (("--pp", self.pp, TOKENS_MAX), ("--tg", self.tg, TOKENS_MAX))
        for option, values, most in (*limits, ("--concurrency", self.concurrency, CONCURRENCY_MAX)):
            if not values:
                raise ConfigError(option, "is missing", f"such as {option} 256,512")
            if min(values) < 1 or max(values) > most:
                raise ConfigError(
                    option,
                    f"expected numbers from 1 to {most:,}, got {','.join(map(str, values))}",
                    f"such as {option} 8,32",
                )
        if min(self.tg) < 2:
            raise ConfigError(
                "--tg",
                "expected 2 or more tokens, got 1: the rate is measured from the first token to the last",
                "to measure only the time to the first token, use `llmtap bench ttft`",
            )

    def cells(self) -> list[ExoCell]:
        return [ExoCell(*point) for point in product(self.pp, self.tg, self.concurrency)]


class ExoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the server and of the requests to it."""

    target: str
    model: str | None = None
    server: Kind = "auto"
    tokenizer: str | None = None
    headers: list[tuple[str, str]] = []
    """Header fields of each request. They can contain secrets such as API keys, so no result shows them."""
    fields: dict[str, msgspec.Raw] = {}
    """JSON fields of each request body; they override the fields that llmtap sets."""
    ca: str | None = None
    """CA certificate (PEM) to trust instead of the system's."""
    timeout: Duration = Duration(600 * NS_PER_S)
    placement: PlacementFilter | None = None
    """exo only: how to place the model on the nodes before the run; None: measure the existing instance."""
    seed: int | None = None
    """Random seed of the first words of prompts. None: a new seed for each run, so that no cache contains the
    prompts of an earlier run."""


class Prompts:
    """Generator of prompts of exact length: a new prompt for each request, or one prompt per length."""

    def __init__(self, counter: TokenCounter, *, is_shared: bool, seed: int) -> None:
        """`is_shared`: all requests of a length have the same prompt; otherwise each request has its own."""
        self.is_shared = is_shared
        """Whether all requests of a length have the same prompt."""
        self._counter = counter
        self._numbers = NumberedBytes(seed)
        """Texts by which prompts differ, so that none is in the server's cache."""
        self._prompts_made = 0
        """Number of prompts so far; each gets the next number as its text."""
        self._overhead = sum(counter.overhead(Prompt()))
        """Number of tokens that the chat template adds to a prompt."""
        atom_is_a_token = counter.tokenizer.counts([ATOM.lstrip() + ATOM * (_ATOM_TEST_COUNT - 1)]) == [
            _ATOM_TEST_COUNT
        ]
        self._atom = ATOM if atom_is_a_token else counter.words.separator + counter.words.table[0]
        """Text that is repeated to reach the length of a prompt."""
        self._by_length: dict[int, SizedPrompt] = {}
        """By number of tokens: the shared prompt."""

    def smallest_tokens(self) -> int:
        """Return the number of tokens of the shortest possible prompt: one word with the chat template."""
        return fit([self._draft(1)], self._counter)[0][1].tokens

    def make(self, pp: int, n: int) -> list[SizedPrompt]:
        """Return the prompts of a batch of `n` requests, each of `pp` tokens as nearly as possible."""
        if self.is_shared:
            if pp not in self._by_length:
                self._by_length[pp] = fit([self._draft(pp)], self._counter)[0]
            return [self._by_length[pp]] * n
        first, self._prompts_made = self._prompts_made, self._prompts_made + n
        return fit([self._draft(pp, number) for number in range(first, first + n)], self._counter)

    def _draft(self, pp: int, number: int = 0) -> Draft:
        """Return how to make a prompt of about `pp` tokens, repeated words; `number` makes it unique."""

        def repeated_atom(words: int) -> Prompt:
            return Prompt(text=self._atom.lstrip() + self._atom * (words - 1))

        def name_then_atom(words: int) -> Prompt:
            name = self._numbers.row(number, min(words, NAME_BYTES))
            return Prompt(text=self._counter.words.text(name) + self._atom * (words - len(name)))

        return Draft(pp, repeated_atom if self.is_shared else name_then_atom, self._overhead)


class _PreparedPrompts:
    """Prompt source of a `ReplayPlan`, which returns prompts that were made before the replay starts."""

    def __init__(self, prompts: Sequence[SizedPrompt]) -> None:
        self._prompts = prompts

    def prompt(self, row: int) -> Prompt:
        return self._prompts[row][0]

    def prompts(self, rows: Sequence[int]) -> list[SizedPrompt]:
        return [self._prompts[row] for row in rows]


class ExoBench:
    """One run of the benchmark of an exo cluster or another server."""

    def __init__(
        self, options: ExoOptions, grid: ExoGrid, watcher: SessionWatcher, *, nvml: Any = None
    ) -> None:
        """`nvml` replaces the package pynvml in tests. Raises ConfigError if an option is wrong."""
        self._options = options
        self._load = LoadPlan.of(
            headers=options.headers, ca=options.ca, timeout=options.timeout, texts=True, scrape="none"
        )
        self._tls = self._load.target.tls()
        self._grid = grid
        self._watcher = watcher
        self._clock = SystemClock()
        self._nvml = nvml
        """Reads memory and power of Nvidia GPUs; None: the library is absent."""
        self._replay: Replay | None = None
        self._placement: asyncio.Task[PlacedInstance] | None = None
        """Task that places the model on exo's nodes; `stop` cancels it."""
        self._sent_pp: set[int] = set()
        """Prompt lengths of earlier batches: the server can have a shared prompt of this length cached."""
        self.stopped = False
        """Whether a signal stopped the benchmark."""

    def stop(self) -> None:
        """Discard the current batch, and keep the earlier batches. A second call cancels open responses."""
        self.stopped = True
        if self._placement is not None:
            self._placement.cancel()
        if self._replay is not None:
            self._replay.stop()

    async def run(self) -> ExoResult:
        """Detect the server, place the model if the options say so, and measure the grid.

        Raises ConfigError if an option is wrong or the server cannot be reached, LlmtapError if exo cannot
        place the model. A stopped run returns its complete batches.
        """
        options = self._options
        self._grid.check()
        if protocol_of(options.target) != "http":
            raise ConfigError(
                "--target",
                f"expected an http:// URL, got {options.target!r}",
                "such as http://127.0.0.1:52415",
            )
        counter = load_counter(options.tokenizer or OWN, chat=True, place="--tokenizer")
        server = await self._detect(options.model)
        if options.placement is None:
            return await self._measure_grid(server, counter, None)
        if server.kind != "exo":
            raise ConfigError(
                "--instance-meta",
                f"applies to exo servers only, but --target is a {server.kind} server",
                "leave out --instance-meta",
            )
        async with side_session(options.headers, self._tls) as session:
            cluster = ExoCluster(session, server.url)
            self._watcher.step("placement", f"waiting for an instance of {server.model}")
            self._placement = asyncio.ensure_future(cluster.place(server.model, options.placement))
            try:
                placed = await self._placement
            except asyncio.CancelledError:
                raise LlmtapError(
                    f"exo: a signal stopped the benchmark before {server.model} was loaded: run it again"
                ) from None
            try:
                server = await self._detect(server.model, placed.id)
                return await self._measure_grid(server, counter, placed)
            finally:
                await cluster.remove(placed)

    async def _detect(self, model: str | None, instance: str | None = None) -> ExoServer:
        options = self._options
        return await detect_server(
            options.target,
            options.headers,
            model=model,
            kind=options.server,
            use_prefix_cache=self._grid.use_prefix_cache,
            tls=self._tls,
            instance=instance,
        )

    async def _measure_grid(
        self, server: ExoServer, counter: TokenCounter, placed: PlacedInstance | None
    ) -> ExoResult:
        options, grid = self._options, self._grid
        seed = secrets.randbits(32) if options.seed is None else options.seed
        is_shared = grid.use_prefix_cache or (server.has_cache_switch and not grid.distinct_prompts)
        prompts = Prompts(counter, is_shared=is_shared, seed=seed)
        smallest = prompts.smallest_tokens()
        if min(grid.pp) < smallest:
            problem = f"{min(grid.pp)} is too small: with the chat template, one word has {smallest} tokens"
            raise ConfigError("--pp", problem, f"use {smallest} or more")
        watch = LoadMonitor(self._clock, server.url, scrape=False, nvml=self._nvml)
        nodes = None
        start_ns = self._clock.mono_ns()
        watch.start()
        if server.kind == "exo":
            nodes = NodeMetrics(self._clock, server.url, options.headers, self._tls)
        warmup_batches: list[SentBatch] = []
        batches: list[SentBatch] = []
        try:
            await self._send_all(server, prompts, warmup_batches, batches)
        except ReplayStopped:
            pass
        finally:
            if nodes is not None:
                await nodes.close()
            series = await watch.close(start_ns)
        is_local = is_loopback(urlsplit(server.url).hostname or "")
        columns = {} if nodes is None else nodes.columns
        power = Power(series.system if is_local else None, columns)
        builder = RunBuilder(server, power, start_ns, None if placed is None else placed.download_s)
        for batch in warmup_batches:
            builder.runs(batch)
        runs = [run for batch in batches for run in builder.runs(batch)]
        return ExoResult(
            runs=runs,
            cluster={
                "target": shown_url(server.url),
                "server": server.kind,
                "owned_by": server.owner,
                "model": server.model_entry,
                "state": server.state,
                "bench": {
                    "llmtap": __version__,
                    **msgspec.structs.asdict(grid),
                    "stopped": self.stopped,
                    "endpoint": server.endpoint,
                    "stream": server.stream,
                    "eos_banned_by": server.eos_banned_by,
                    "cache_switched_by_request": server.has_cache_switch,
                    "prompts_alike": is_shared,
                    "seed": seed,
                    "counted_by": counter.method,
                    "tokenizer": counter.tokenizer.name.rpartition("/")[2],
                    "notes": [
                        *self._notes(server, is_local, placed),
                        *self._cache_notes(runs),
                        *_construction_notes(runs),
                        *dict.fromkeys(_length_notes(runs)),
                    ],
                },
            },
            system_metrics=SystemMetrics(
                local={"server_is_here": is_local, **msgspec.to_builtins(series.samples())},
                nodes={node: msgspec.to_builtins(batch.samples(start_ns)) for node, batch in columns.items()},
                nodes_failed=None if nodes is None else nodes.failed,
                energy=total_of(power.energy(*batch.window_ns) for batch in batches),
            ),
        )

    async def _send_all(
        self, server: ExoServer, prompts: Prompts, warmup_batches: list[SentBatch], batches: list[SentBatch]
    ) -> None:
        """Send the warm-up, then each cell of the grid `repeat` times. Append what was sent to the two
        lists."""
        cells, grid = self._grid.cells(), self._grid
        first = ExoCell(cells[0].pp, cells[0].tg, 1)
        for i in range(grid.warmup):
            self._watcher.step("warm-up", f"{first}, {i + 1:,} of {grid.warmup:,}")
            warmup_batches.append(await self._send(server, prompts, first, i))
        batch_count = len(cells) * grid.repeat
        for index, (cell, i) in enumerate(product(cells, range(grid.repeat))):
            self._watcher.report_remaining(f"{batch_count - index:,} of {batch_count:,} batches")
            self._watcher.step(str(cell), f"{i + 1:,} of {grid.repeat:,}")
            batches.append(await self._send(server, prompts, cell, i))

    async def _send(self, server: ExoServer, prompts: Prompts, cell: ExoCell, repeat: int) -> SentBatch:
        """Send the requests of one cell at once, and return them with their exchanges."""
        if self.stopped:
            raise ReplayStopped("a signal stopped the benchmark before the next batch was sent: run it again")
        n, change = cell.concurrency, msgspec.structs.replace
        sized_prompts = prompts.make(cell.pp, n)
        batch = SentBatch(
            cell, repeat, sized_prompts, is_repeat=prompts.is_shared and (n > 1 or cell.pp in self._sent_pp)
        )
        self._sent_pp.add(cell.pp)
        # Set all arrivals to 0, so that one process sends all requests without waiting between them.
        requests = Requests(array("q", bytes(8 * n)), array("q", [cell.pp] * n), array("q", [cell.tg] * n))
        self._replay = Replay(
            ReplayPlan(requests, _PreparedPrompts(sized_prompts), {"bench": "exo", "requests": n}),
            change(
                self._load,
                target=change(self._load.target, url=server.url, path=server.endpoint),
                bodies=BodyOptions(
                    server="auto" if server.kind == "exo" else server.kind,
                    model=server.model,
                    stream=server.stream,
                    min_tokens=True,
                    temperature=0.0,
                    fields={**server.fields, **self._options.fields},
                ),
            ),
            self._watcher,
            start_recording=batch.start_recording,
        )
        try:
            result = await self._replay.run()
        except ConfigError as exc:
            if exc.place != "--endpoint":
                raise
            hint = "give the URL of a server with chat completions; for an exo server, add --server exo"
            raise ConfigError("--target", exc.problem, hint) from None
        finally:
            self._replay = None
        if self.stopped:
            raise ReplayStopped(
                "a signal stopped the benchmark before all answers of a batch arrived: run it again"
            )
        batch.findings += msgspec.convert(result["verdict"]["findings"], list[JudgedFinding])
        return batch

    def _notes(self, server: ExoServer, is_local: bool, placed: PlacedInstance | None) -> Iterator[str]:
        if placed is not None and placed.others:
            yield f"{placed.others:,} other placements of the model fit the options and were not measured"
        if self.stopped:
            yield "it was stopped: the grid is not complete"
        if server.eos_banned_by is None:
            yield "answers may end early: the field that makes this server ban EOS is not known (--server)"
        if not server.has_cache_switch and not self._grid.use_prefix_cache:
            yield "the prefix cache is not switched off: each request has a prompt of its own instead"
        if self._options.tokenizer is None and server.owner != _LLMTAP_OWNER:
            yield "prompts were counted by llmtap's own tokenizer: --tokenizer makes them exact"
        if server.kind != "exo" and not is_local:
            yield "the server is not on this host: its power and memory are not known"

    def _cache_notes(self, runs: Sequence[ExoRun]) -> Iterator[str]:
        """Yield a note if the server reports cache hits although the options do not use the prefix cache."""
        hit_count = sum(1 for run in runs if run.prefix_cache_hit not in (None, "none"))
        if hit_count and not self._grid.use_prefix_cache:
            yield (
                f"{hit_count:,} of {len(runs):,} requests hit the prefix cache although it was not to be used"
                ": their prefill rates are of the rest of the prompt"
            )


def _construction_notes(runs: Sequence[ExoRun]) -> Iterator[str]:
    """Yield a note on how prompts get their lengths, and on how many have exactly the requested length."""
    if runs:
        exact = sum(run.pp_tokens == run.pp for run in runs)
        yield (
            "prompts get their lengths by proportional guesses of the number of words, each counted by the"
            " tokenizer, not by a binary search as in exo-bench:"
            f" {exact:,} of {len(runs):,} have exactly pp tokens"
        )


def _length_notes(runs: Iterable[ExoRun]) -> Iterator[str]:
    """Yield a note for each prompt or response whose number of tokens differs from the requested number."""
    for run in runs:
        server_count, generated = run.stats.prompt_tokens, run.stats.generation_tokens
        if run.pp_tokens != run.pp:
            yield f"pp {run.pp:,} could not be met: its prompts have {run.pp_tokens:,} tokens"
        if server_count is not None and server_count != run.pp_tokens:
            yield f"the server counts {server_count:,} tokens in prompts of {run.pp_tokens:,}"
        if run.outcome == "complete" and generated != run.tg:
            yield f"not all answers of tg {run.tg:,} have as many tokens: see generation_tokens"
