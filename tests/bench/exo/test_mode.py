"""The exo benchmark against the simulated engine, whose truth it finds; prompts have the wanted tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtap.bench.exo.mode import ExoBench, ExoGrid, ExoOptions, Prompts
from llmtap.bench.exo.result import ExoResult
from llmtap.errors import ConfigError
from llmtap.sim.server.options import EngineOptions, PacingOptions, SimOptions, load_engine
from llmtap.units import Duration
from llmtap.workload.prompts.tokenizer import OWN, load_counter
from tests.bench.exo.exo import LIMIT_S, bench, know_power
from tests.bench.support import Silent
from tests.support.nvml import FakeGpu, FakeNvml
from tests.support.servers.peer import play
from tests.support.servers.sim_engine import engine
from tests.support.workloads.model_folder import model_folder

MS = 1_000_000


@pytest.mark.parametrize(
    ("grid", "place"),
    [
        (ExoGrid(pp=[], tg=[8]), "--pp"),
        (ExoGrid(pp=[64], tg=[]), "--tg"),
        (ExoGrid(pp=[0], tg=[8]), "--pp"),
        (ExoGrid(pp=[64], tg=[8], concurrency=[0]), "--concurrency"),
        (ExoGrid(pp=[64], tg=[8], concurrency=[1_001]), "--concurrency"),
        (ExoGrid(pp=[64], tg=[8, 1]), "--tg"),
    ],
)
def test_a_grid_that_cannot_be_measured_is_refused(grid: ExoGrid, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid.check()
    assert caught.value.place == place


def test_the_grid_goes_pp_by_pp() -> None:
    cells = ExoGrid(pp=[8, 4], tg=[2, 3], concurrency=[1, 5]).cells()
    assert [(c.pp, c.tg, c.concurrency) for c in cells] == [
        (8, 2, 1),
        (8, 2, 5),
        (8, 3, 1),
        (8, 3, 5),
        (4, 2, 1),
        (4, 2, 5),
        (4, 3, 1),
        (4, 3, 5),
    ]


def cached() -> EngineOptions | None:
    """An engine with a prefix cache of blocks of 16 tokens."""
    return load_engine("continuous_batching", {}, serving={"prefix_cache": "true"}, readings={})


def test_rates_are_those_of_the_server_s_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    know_power(monkeypatch)

    async def measured() -> tuple[ExoResult, list[dict[str, Any]]]:
        async with engine(SimOptions(ttft=Duration(80 * MS), itl=Duration(8 * MS))) as e:
            result = await bench(
                e.url,
                ExoGrid(pp=[40], tg=[24], concurrency=[1, 3], repeat=2, warmup=1),
                nvml=FakeNvml(FakeGpu(used=3 << 30)),
            )
            return result, await e.truths()

    result, truths = play(measured(), LIMIT_S)
    runs = result.runs
    assert len(truths) == 1 + (1 + 3) * 2, "the warm-up's, and a batch for each point and repeat"
    assert len(runs) == len(truths) - 1
    assert [(r.concurrency, r.repeat_index, r.concurrent_index) for r in runs] == [
        (n, repeat, index) for n in (1, 3) for repeat in (0, 1) for index in range(n)
    ]
    for one in runs:
        assert one.outcome == "complete" and one.error is None
        assert (one.pp_tokens, one.stats.prompt_tokens, one.stats.generation_tokens) == (40, 40, one.tg)
        assert one.finish_reason == "length" and one.timing == "client"
        assert one.prefix_cache_hit is None, "a server without a cache"
        assert one.output_text_preview
        assert one.stats.peak_memory_usage == {"inBytes": 3 << 30}
        # By the formulas, from what stands beside.
        assert one.ttft_s is not None and one.stats.prompt_tps == pytest.approx(40 / one.ttft_s)
        assert one.elapsed_s is not None and one.batch.wall_s is not None
        assert one.elapsed_s <= one.batch.wall_s
        assert one.batch.joules == pytest.approx(300.0 * one.batch.wall_s)
        assert one.stats.generation_tps is not None
        assert 23 / one.stats.generation_tps <= one.elapsed_s - one.ttft_s
    by_repeat = [[r for r in runs if (r.concurrency, r.repeat_index) == (3, i)] for i in (0, 1)]
    for together in by_repeat:
        rates = [r.stats.generation_tps for r in together]
        report = together[0].batch
        assert all(r.batch == report for r in together)
        assert report.per_req_tps == max(rate for rate in rates if rate is not None)
        assert report.agg_gen_tps == pytest.approx(3 * report.per_req_tps)
    energy = result.system_metrics.energy
    assert (energy.average_power_w, energy.seconds_missing) == (pytest.approx(300.0), 0.0)
    assert json.loads(result.to_json()).keys() == {"runs", "cluster", "system_metrics"}


def test_a_rate_that_could_not_be_measured_is_not_valid() -> None:
    """A whole answer in one event has no time between its first and its last token."""

    async def measured() -> ExoResult:
        async with engine(SimOptions(pacing=PacingOptions(tokens_per_chunk=8))) as e:
            return await bench(e.url, ExoGrid(pp=[40], tg=[8]))

    (one,) = play(measured(), LIMIT_S).runs
    assert one.outcome == "complete" and one.stats.generation_tps is None
    assert "generation" in one.not_valid


def test_with_the_cache_hits_are_told_and_their_rates_kept() -> None:
    async def measured() -> ExoResult:
        async with engine(behind=cached()) as e:
            return await bench(e.url, ExoGrid(pp=[64, 160], tg=[4], repeat=2, use_prefix_cache=True))

    cold, again, longer, long_again = play(measured(), LIMIT_S).runs
    assert (cold.prefix_cache_hit, cold.cached_tokens, cold.prompt_tps_stored) == ("none", 0, False)
    assert (again.prefix_cache_hit, again.prompt_tps_stored) == ("exact", True)
    assert again.stats.prompt_tps == cold.stats.prompt_tps
    assert (longer.prefix_cache_hit, longer.cached_tokens) == ("partial", 64)
    assert longer.ttft_s is not None and longer.stats.prompt_tps == pytest.approx((160 - 64) / longer.ttft_s)
    assert (long_again.prefix_cache_hit, long_again.stats.prompt_tps) == ("exact", longer.stats.prompt_tps)


def test_a_prompt_shorter_than_the_template_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path / "m"))

    async def refused() -> tuple[ConfigError, int]:
        async with engine() as e:
            with pytest.raises(ConfigError) as caught:
                await bench(e.url, ExoGrid(pp=[4_000, 3], tg=[4]), tokenizer=folder)
            return caught.value, len(await e.truths())

    error, sent = play(refused(), LIMIT_S)
    counter = load_counter(folder, chat=True, place="")
    smallest = Prompts(counter, is_shared=False, seed=0).smallest_tokens()
    assert (error.place, error.hint, sent) == ("--pp", f"use {smallest} or more", 0)
    assert error.problem.startswith("3 is too small")


def test_it_stops_between_batches_and_tells_what_it_has() -> None:
    class Stopping(Silent):
        bench: ExoBench

        def step(self, name: str, message: str, seconds: float | None = None) -> None:
            super().step(name, message)
            if len(self.steps) == 3:
                self.bench.stop()

    async def measured() -> ExoResult:
        async with engine() as e:
            watcher = Stopping()
            options = ExoOptions(target=e.url)
            watcher.bench = one = ExoBench(options, ExoGrid(pp=[16], tg=[4], repeat=9), watcher)
            return await one.run()

    result = play(measured(), LIMIT_S)
    assert [r.repeat_index for r in result.runs] == [0, 1]
    assert result.cluster["bench"]["stopped"] is True


PROMPT_SEED = 11


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("model", [False, True])
def test_prompts_have_their_tokens_by_the_chat_template(tmp_path: Path, alike: bool, model: bool) -> None:
    counter = load_counter(
        str(model_folder(tmp_path / "m")) if model else OWN, chat=True, place="--tokenizer"
    )
    prompts = Prompts(counter, is_shared=alike, seed=PROMPT_SEED)
    smallest = prompts.smallest_tokens()
    assert smallest == (1 if not model else min(counter.count([prompts.make(1, 1)[0][0]])))
    for pp in (smallest, smallest + 1, 33, 128, 1_000):
        made = prompts.make(pp, 3)
        assert counter.count([prompt for prompt, _ in made]) == [pp] * 3
        assert [fitted.tokens for _, fitted in made] == [pp] * 3


def test_no_two_prompts_begin_alike_unless_the_cache_is_switched_off_or_wanted() -> None:
    """Seed 003, "Concurrency", has one prompt for all threads: its server switches the cache off."""
    counter = load_counter(OWN, chat=True, place="")
    apart = Prompts(counter, is_shared=False, seed=PROMPT_SEED)
    texts = [prompt.text for _ in range(3) for prompt, _ in apart.make(64, 4)]
    assert len({text.split()[0] for text in texts}) == 12
    alike = Prompts(counter, is_shared=True, seed=PROMPT_SEED)
    assert len({prompt.text for _ in range(3) for prompt, _ in alike.make(64, 4)}) == 1


@pytest.mark.parametrize("distinct", [False, True])
def test_without_the_cache_every_prompt_is_computed(distinct: bool) -> None:
    async def measured() -> ExoResult:
        async with engine(behind=cached()) as e:
            grid = ExoGrid(pp=[64], tg=[4], concurrency=[1, 3], repeat=2, distinct_prompts=distinct)
            return await bench(e.url, grid)

    result = play(measured(), LIMIT_S)
    assert [r.cached_tokens for r in result.runs] == [0] * 8
    assert {r.prefix_cache_hit for r in result.runs} == {"none"}
    assert not any(r.prompt_tps_stored for r in result.runs)
    notes = result.cluster["bench"]["notes"]
    assert any("prompt of its own" in note for note in notes)
    assert not any("hit the prefix cache" in note for note in notes)
    # exo-bench searches the length of a prompt; the report says that ours are made in another way.
    (construction,) = (note for note in notes if "binary search" in note)
    assert "proportional guesses" in construction and construction.endswith("8 of 8 have exactly pp tokens")
    assert (result.cluster["server"], result.cluster["owned_by"]) == ("vllm", "llmtap")


def test_hits_of_a_cache_that_was_not_to_be_used_are_noted() -> None:
    """The same seed gives the same prompts, so that a second benchmark finds them in the cache."""

    async def measured() -> ExoResult:
        async with engine(behind=cached()) as e:
            await bench(e.url, ExoGrid(pp=[64], tg=[4]))
            return await bench(e.url, ExoGrid(pp=[64], tg=[4], repeat=2))

    result = play(measured(), LIMIT_S)
    assert [r.prefix_cache_hit for r in result.runs] == ["partial", "none"]
    notes = result.cluster["bench"]["notes"]
    assert any("1 of 2 requests hit the prefix cache" in note for note in notes)
