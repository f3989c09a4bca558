"""Rows keep to their class; a load written anew is the same work in other words."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.bench.run.session import Load
from llmtap.bench.tests.mixes import (
    LONG,
    SHORT,
    ClassMix,
    RequestClass,
    check_classes,
    open_mix,
    prefixes_of,
    skewed_classes,
)
from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S
from llmtap.workload.ietf import SKEWED
from llmtap.workload.plan import NO_CONTEXT, RandomIds
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.prompts.tokenizer import as_text

MIX = ClassMix((SHORT, LONG))
spans = st.tuples(st.integers(1, 5_000), st.integers(0, 5_000)).map(lambda s: (s[0], s[0] + s[1]))


def rows_by_class(mix: ClassMix, count: int, seed: int) -> dict[str, list[tuple[int, int]]]:
    requests = mix.requests(count, seed)
    result: dict[str, list[tuple[int, int]]] = {one.name: [] for one in mix.classes}
    lengths = zip(requests.input, requests.output, strict=True)
    for name, row in zip(mix.class_names(seed), lengths, strict=False):
        result[name].append(row)
    return result


@settings(max_examples=40)
@given(spans, spans, spans, spans, st.floats(0.05, 0.95), st.integers(0, 1 << 40))
def test_lengths_keep_to_their_class(
    a: tuple[int, int], b: tuple[int, int], c: tuple[int, int], d: tuple[int, int], share: float, seed: int
) -> None:
    first = RequestClass(name="a", share=share, input=a, output=b)
    second = RequestClass(name="b", share=1 - share, input=c, output=d)
    mix = ClassMix((first, second))
    for one in mix.classes:
        for given_tokens, made in rows_by_class(mix, 100, seed)[one.name]:
            assert one.input[0] <= given_tokens <= one.input[1]
            assert one.output[0] <= made <= one.output[1]
    few = mix.requests(30, seed)
    assert list(few.input) == list(mix.requests(100, seed).input)[:30]
    assert list(few.output) == list(mix.requests(100, seed).output)[:30]


def test_classes_of_synthetic_skewed_are_requests_of_it_with_lengths_in_their_ranges() -> None:
    """Shares by the tables of the normal distribution: 0.43013 x 0.42583 and 0.07622 x 0.17098."""
    mix = skewed_classes((SHORT, LONG), RandomIds(1_000), per_class=500)
    assert [one.share for one in mix.classes] == pytest.approx([0.18316, 0.013032], rel=1e-3)
    assert mix.mean_tokens() == pytest.approx(399.58 + 179.98, abs=0.1)
    count = 40_000
    requests, own = mix.requests(count, 42), SKEWED.requests(count, 42)
    assert (requests.input, requests.output) == (own.input, own.output)
    names = list(islice(mix.class_names(42), count))
    for name, given_tokens, made in zip(names, requests.input, requests.output, strict=True):
        fitting = [
            one.name
            for one in (SHORT, LONG)
            if one.input[0] <= given_tokens <= one.input[1] and one.output[0] <= made <= one.output[1]
        ]
        assert fitting == ([] if name is None else [name])
    counted = Counter(names)
    for one in mix.classes:
        # Four standard deviations of a binomial.
        spread = 4 * (count * one.share * (1 - one.share)) ** 0.5
        assert counted[one.name] == pytest.approx(count * one.share, abs=spread)
    assert (
        mix.source(mix.plan(9, 42), 42).prompt(0).ids
        == SKEWED.prompts(own.select_rows(range(9)), 42).prompt(0).ids
    )
    alone = mix.only_class("long").requests(50, 1)
    assert min(alone.input) >= 1_024 and max(alone.output) <= 1_024


def test_a_class_without_requests_of_synthetic_skewed_is_refused() -> None:
    beyond = RequestClass(name="beyond", share=0.2, input=(4_097, 9_000), output=(256, 1_024))
    with pytest.raises(ConfigError, match="beyond"):
        skewed_classes((SHORT, beyond), RandomIds(1_000), per_class=1)


def test_an_open_mix_of_synthetic_skewed_counts_its_classes_alone() -> None:
    load = open_mix(
        skewed_classes((SHORT, LONG), RandomIds(1_000), per_class=5), rate_rps=50.0, seed=5, per_class=5
    )
    counted = Counter(load.class_of(row) for row in range(len(load.plan.requests)))
    assert counted["long"] == 5 < counted["short"] < counted[None]
    assert load.class_of(len(load.plan.requests) - 1) == "long"


def test_an_open_mix_is_long_enough_and_has_enough_of_each() -> None:
    load = open_mix(MIX, rate_rps=50.0, seed=5, duration_s=4.0, per_class=60)
    requests = load.plan.requests
    counted = Counter(load.class_of(row) for row in range(len(requests)))
    assert min(counted.values()) >= 60
    assert requests.arrival_ns[-1] >= 4 * NS_PER_S
    # The last row is the one that was missing.
    assert counted[load.class_of(len(requests) - 1)] == 60 or requests.arrival_ns[-2] < 4 * NS_PER_S
    for row in range(len(requests)):
        one = {"short": SHORT, "long": LONG}[load.class_of(row) or ""]
        assert one.input[0] <= requests.input[row] <= one.input[1]
    assert load.plan.describe()["arrivals"]["rate_rps"] == 50.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ((SHORT,), r"at least two classes \(IETF draft, section 5.6.2\), got 1"),
        ((SHORT, SHORT), "expected a different name for each class"),
        ((SHORT, RequestClass(name="x", share=0.5, input=(1, 2), output=(1, 2))), "add up to 1.3"),
        (
            (SHORT, RequestClass(name="x", share=0.2, input=(9, 2), output=(1, 2))),
            "input ends at 2",
        ),
    ],
)
def test_what_is_no_mix_is_refused(classes: tuple[RequestClass, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_classes(classes)
    assert caught.value.place == "classes"


CODE = prefixes_of("code-completion")


def prompts(load: Load) -> list[Prompt]:
    assert load.plan.prompts is not None
    return [load.plan.prompts.prompt(row) for row in range(len(load.plan.requests))]


def test_other_words_are_the_same_work() -> None:
    first, again, other = (CODE.open_load(40, 7, texts, 3.0) for texts in (1, 1, 2))
    for load in (again, other):
        assert load.plan.requests.input == first.plan.requests.input
        assert load.plan.requests.output == first.plan.requests.output
        assert load.plan.requests.arrival_ns == first.plan.requests.arrival_ns
        assert load.plan.requests.blocks == first.plan.requests.blocks
    ours, same, others = prompts(first), prompts(again), prompts(other)
    assert ours == same
    contexts, _ = CODE.row_prefixes(40, 7)
    for a, b, context in zip(ours, others, contexts, strict=True):
        assert a.text[:30] != b.text[:30]
        assert bool(a.system) == bool(b.system) == (context != NO_CONTEXT)
        # The first words already: a cache finds not even one block.
        assert not a.system or a.system[:30] != b.system[:30]
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_prefixes_have_their_lengths_and_are_one_text_each() -> None:
    load = CODE.closed_load(60, 3, 9, slots=4)
    contexts, lengths = CODE.row_prefixes(60, 3)
    assert len(lengths) == 10
    assert all(512 <= tokens <= 1_024 for tokens in lengths)
    seen: dict[int, str] = {}
    for prompt, context, tokens in zip(prompts(load), contexts, load.plan.requests.input, strict=True):
        if context != NO_CONTEXT:
            assert seen.setdefault(context, prompt.system) == prompt.system
            assert count_tokens(prompt.system) == lengths[context]
        assert count_tokens(as_text(prompt)) == tokens
    assert len(set(seen.values())) == len(seen) > 3


def test_a_workload_of_ones_own_gets_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "plain.toml"
    file.write_text("input = 40\noutput = 8\n")
    work = prefixes_of(str(file), tokens=(128, 128))
    assert set(work.closed_load(10, 1, 1, 2).plan.requests.input) == {168}
    with pytest.raises(ConfigError, match="share no prefix") as caught:
        prefixes_of(str(file))
    assert caught.value.place == "prefix_tokens"
