"""A mix of classes: rows keep to their class's ranges, and are the same however many are asked for."""

import itertools
from collections import Counter
from math import exp, log
from statistics import NormalDist, fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.bench.tests.mixes import (
    LONG,
    SHORT,
    ClassMix,
    RequestClass,
    check_classes,
    closed_mix,
    open_mix,
)
from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S
from llmtap.workload.ietf.synthetic import SKEWED
from llmtap.workload.prompts.words import count_tokens
from llmtap.workload.registry import report_of

MIX = ClassMix((SHORT, LONG))
spans = st.tuples(st.integers(1, 5_000), st.integers(0, 5_000)).map(lambda s: (s[0], s[0] + s[1]))


def rows_by_class(mix: ClassMix, count: int, seed: int) -> dict[str, list[tuple[int, int]]]:
    requests = mix.requests(count, seed)
    found: dict[str, list[tuple[int, int]]] = {one.name: [] for one in mix.classes}
    lengths = zip(requests.input, requests.output, strict=True)
    for name, row in zip(mix.names(seed), lengths, strict=False):
        found[name].append(row)
    return found


@settings(max_examples=40)
@given(
    spans, spans, spans, spans, st.sampled_from(["skewed", "uniform"]), st.floats(0.05, 0.95),
    st.integers(0, 1 << 40),
)  # fmt: skip
def test_lengths_keep_to_their_class(
    a: tuple[int, int], b: tuple[int, int], c: tuple[int, int], d: tuple[int, int], lengths: str,
    share: float, seed: int,
) -> None:  # fmt: skip
    first = RequestClass(name="a", share=share, input=a, output=b)
    second = RequestClass(name="b", share=1 - share, input=c, output=d)
    mix = ClassMix((first, second), lengths)  # type: ignore[arg-type]
    for one in mix.classes:
        for given_tokens, made in rows_by_class(mix, 100, seed)[one.name]:
            assert one.input[0] <= given_tokens <= one.input[1]
            assert one.output[0] <= made <= one.output[1]
    few = mix.requests(30, seed)
    assert list(few.input) == list(mix.requests(100, seed).input)[:30]
    assert list(few.output) == list(mix.requests(100, seed).output)[:30]


def test_shares_are_as_asked() -> None:
    counted = Counter(itertools.islice(MIX.names(7), 20_000))
    # Four standard deviations of a binomial.
    assert counted["long"] / 20_000 == pytest.approx(0.2, abs=4 * (0.16 / 20_000) ** 0.5)


def test_lengths_are_the_log_normals_of_synthetic_skewed_within_the_ranges() -> None:
    """Quartiles of a class against the truncated law, worked out here."""
    found = rows_by_class(MIX, 40_000, 3)
    for one in (SHORT, LONG):
        for column, (mu, sigma), (low, high) in (
            (0, (5.5, 1.0), one.input), (1, (4.5, 1.2), one.output),
        ):  # fmt: skip
            law = NormalDist(mu, sigma)
            a, b = law.cdf(log(low - 0.5)), law.cdf(log(high + 0.5))
            values = sorted(row[column] for row in found[one.name])
            for p in (0.25, 0.5, 0.75):
                expected = exp(law.inv_cdf(a + p * (b - a)))
                assert values[int(p * len(values))] == pytest.approx(expected, rel=0.03)


def test_uniform_lengths_are_all_as_likely() -> None:
    found = rows_by_class(ClassMix((SHORT, LONG), "uniform"), 40_000, 3)
    assert median(row[0] for row in found["long"]) == pytest.approx(2_560, rel=0.03)
    assert {row[1] for row in found["short"]} == set(range(32, 129))


def test_mean_tokens_are_those_of_many_rows() -> None:
    for mix in (MIX, MIX.alone("long"), ClassMix((SHORT, LONG), "uniform")):
        requests = mix.requests(40_000, 11)
        mean = fmean(a + b for a, b in zip(requests.input, requests.output, strict=True))
        assert mix.mean_tokens() == pytest.approx(mean, rel=0.02)


def test_why_synthetic_skewed_itself_is_no_mix_of_these_classes() -> None:
    """18 % of it are short, 1.3 % are long, as the module says."""
    requests = SKEWED.requests(20_000, 42)
    rows = list(zip(requests.input, requests.output, strict=True))

    def share(one: RequestClass) -> float:
        return sum(
            one.input[0] <= a <= one.input[1] and one.output[0] <= b <= one.output[1] for a, b in rows
        ) / len(rows)

    assert share(SHORT) == pytest.approx(0.18, abs=0.01)
    assert share(LONG) == pytest.approx(0.013, abs=0.003)


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


def test_a_chat_gets_words_of_the_length_and_no_two_begin_alike() -> None:
    load = closed_mix(MIX, slots=2, requests=40, seed=1)
    assert load.plan.prompts is not None
    texts = [load.plan.prompts.prompt(row).text for row in range(40)]
    assert [count_tokens(text) for text in texts] == list(load.plan.requests.input)
    assert len({text[:30] for text in texts}) == 40


def test_ids_are_below_the_vocabulary() -> None:
    mix = ClassMix((SHORT, LONG), content="ids", vocabulary=300)
    load = closed_mix(mix, slots=2, requests=20, seed=1, chat=False)
    assert load.plan.prompts is not None
    for row in range(20):
        ids = load.plan.prompts.prompt(row).ids
        assert len(ids) == load.plan.requests.input[row]
        assert max(ids) < 300
    assert mix.describe()["content"]["kind"] == "ids"  # type: ignore[index]


def test_one_class_alone_is_only_that() -> None:
    assert set(itertools.islice(MIX.alone("long").names(1), 50)) == {"long"}
    assert rows_by_class(MIX.alone("short"), 50, 1)["short"]


def test_it_says_what_it_is() -> None:
    told = report_of(MIX, MIX.requests(10, 1), 1)
    assert told["name"] == "synthetic-skewed"
    assert [one["name"] for one in told["classes"]] == ["short", "long"]
    assert told["deviations"]
    assert ClassMix((SHORT, LONG), "uniform").name != "synthetic-skewed"


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ((SHORT,), "fewer than two"),
        ((SHORT, SHORT), "comes twice"),
        ((SHORT, RequestClass(name="x", share=0.5, input=(1, 2), output=(1, 2))), "add up to 1.3"),
        ((SHORT, RequestClass(name="x", share=0.2, input=(9, 2), output=(1, 2))), "input is from 9 to 2"),
    ],
)
def test_what_is_no_mix_is_refused(classes: tuple[RequestClass, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_classes(classes)
    assert caught.value.place == "classes"
