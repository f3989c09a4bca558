"""What is written is arrivals, which their description makes again, or an error that names the field."""

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.workload.arrivals import FORMS, parse_arrivals


@pytest.mark.parametrize(
    ("text", "rate_rps", "problem"),
    [
        ("", 1, "no arrival process is called ''"),
        ("poisson", None, "poisson: no mean rate is given"),
        ("poisson", 0, "poisson: rate: expected requests per second"),
        ("poisson:burstiness=1", 1, "poisson: burstiness: unknown field"),
        ("poisson:now", 1, "poisson: expected name=value, got 'now'"),
        ("gamma", 1, "gamma: expected either burstiness or cv"),
        ("gamma:cv=1,cv=1", 1, "gamma: cv: is given twice"),
        ("gamma:cv=much", 1, "gamma: cv: expected a number, got 'much'"),
        ("gamma:cv=0", 1, "gamma: cv: expected a number from 0.001"),
        ("onoff:on=2s", 1, "onoff: off: is missing"),
        ("onoff:on=2x,off=1s", 1, "onoff: on: expected a duration"),
        ("onoff:on=2s,off=1s,idel=1", 1, r"onoff: idel: unknown field \(did you mean idle\?\)"),
        ("onoff:on=2s,off=8s,idle=2", 1, "onoff: idle: expected at most the mean rate"),
        ("ramp:from=1,to=50,over=60s", 3, "ramp: the arrival process contains its own rates"),
        ("ramp:from=1,to=5,over=" + "9" * 400, None, "ramp: over: expected a duration"),
        ("steps", None, "steps: expected at least one step"),
        ("steps:10", None, "steps: step 1: expected a rate, x and a time such as 10x30s, got '10'"),
        ("steps:10x30s,x30s", None, "steps: step 2: expected a number, got ''"),
        ("steps:10x30s,0x30s", None, "steps: last step: expected requests per second"),
        ("diurnal:amplitude=2,period=24h", 1, "diurnal: amplitude: expected a number from 0 to 1, got 2"),
        ("diurnal:amplitude=1,period=0s", 1, "diurnal: period: expected a time above 0"),
    ],
)
def test_what_cannot_be_read_is_refused_by_place_process_and_field(
    text: str, rate_rps: float | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_arrivals(text, rate_rps=rate_rps, seed=1, place="load.arrivals in x.toml")
    assert caught.value.place == "load.arrivals in x.toml"
    assert caught.value.hint


NUMBERS = st.floats(1e-3, 1e3).map(repr)
TIMES = st.integers(1, 10**6).flatmap(lambda n: st.sampled_from([f"{n}ms", f"{n}s", f"{n}us", str(n)]))
TEXTS = st.one_of(
    st.builds("gamma:cv={}".format, NUMBERS),
    st.builds("onoff:on={},off={}".format, TIMES, TIMES),
    st.builds("ramp:from={},to={},over={}".format, NUMBERS, NUMBERS, TIMES),
    st.lists(st.builds("{}x{}".format, NUMBERS, TIMES), min_size=1, max_size=5).map(
        lambda steps: "steps:" + ",".join(steps)
    ),
    st.builds("diurnal:amplitude={!r},period={}".format, st.floats(0, 1), TIMES),
)


@given(TEXTS, st.floats(1e-3, 1e3), st.integers())
def test_a_description_makes_the_same_arrivals_again(text: str, rate_rps: float, seed: int) -> None:
    own = text.startswith(("ramp", "steps"))
    arrivals = parse_arrivals(f" {text}", rate_rps=None if own else rate_rps, seed=seed)
    result: dict[str, Any] = arrivals.describe()
    assert result == {"arrivals": text, "rate_rps": None if own else rate_rps, "seed": seed}
    again = parse_arrivals(result["arrivals"], rate_rps=result["rate_rps"], seed=result["seed"])
    assert list(islice(again, 20)) == list(islice(arrivals, 20))


FIELDS = st.sampled_from(
    ["burstiness", "cv", "on", "off", "idle", "from", "to", "over", "amplitude", "period"]
)
VALUES = st.one_of(
    st.floats().map(repr),
    st.integers().map(str),
    st.sampled_from(["1s", "-1s", "1e3", "", "=", "x", "1h"]),
    st.text(max_size=5),
)
PARTS = st.one_of(
    st.builds("{}={}".format, FIELDS, VALUES), st.builds("{}x{}".format, VALUES, VALUES), VALUES
)
ANYTHING = st.builds(
    lambda name, parts: name + ":" + ",".join(parts),
    st.one_of(st.sampled_from(sorted(FORMS)), st.text(max_size=8)),
    st.lists(PARTS, max_size=5),
)


@given(ANYTHING, st.one_of(st.none(), st.floats(), st.integers()))
def test_anything_else_is_an_error_of_its_place(text: str, rate_rps: float | None) -> None:
    try:
        arrivals = parse_arrivals(text, rate_rps=rate_rps, seed=1, place="here")
    except ConfigError as exc:
        assert exc.place == "here"
        return
    times = list(islice(arrivals, 10))
    assert times == sorted(times)
