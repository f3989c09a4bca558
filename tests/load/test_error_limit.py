"""A run gives up when, and only when, too many of its latest answers failed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.load.run import ErrorWatch, StopErrors, parse_stop_errors


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("50%", StopErrors(0.5, 100)),
        (" 0.25 ", StopErrors(0.25, 100)),
        ("0%", StopErrors(0.0, 100)),
        ("0", StopErrors(0.0, 100)),
        ("99.9%/200", StopErrors(0.999, 200)),
        ("5% / 1", StopErrors(0.05, 1)),
    ],
)
def test_a_rule(text: str, rule: StopErrors) -> None:
    found = parse_stop_errors(text)
    assert found.share == pytest.approx(rule.share)
    assert found.latest == rule.latest


@pytest.mark.parametrize(
    "text",
    ["", "%", "half", "50", "100%", "1", "-1%", "-0.1", "50%%", "50%/", "50%/0", "50%/x", "50%/-3", "nan",
     "nan%", "inf", "50%/1.5", "50%/9999999999"],
)  # fmt: skip
def test_no_rule_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_stop_errors(text, "--stop-errors")
    assert refused.value.place == "--stop-errors"
    assert refused.value.hint


def test_nobody_judges_before_there_are_enough() -> None:
    watch = ErrorWatch(StopErrors(0.0, 3))
    assert [watch.ended(failed=True) for _ in range(2)] == [None, None]
    assert watch.ended(failed=False) == "2 of the latest 3 answers failed"


def test_a_server_that_dies_late_is_noticed_soon() -> None:
    watch = ErrorWatch(StopErrors(0.5, 10))
    assert all(watch.ended(failed=False) is None for _ in range(10_000))
    assert [watch.ended(failed=True) is not None for _ in range(6)] == [False] * 5 + [True]


@given(st.lists(st.booleans()), st.floats(0, 0.99), st.integers(1, 12))
def test_it_is_the_share_of_the_latest(answers: list[bool], share: float, latest: int) -> None:
    watch = ErrorWatch(StopErrors(share, latest))
    for i, failed in enumerate(answers, 1):
        window = answers[max(0, i - latest) : i]
        broken = len(window) == latest and sum(window) > share * latest
        assert (watch.ended(failed=failed) is not None) is broken
