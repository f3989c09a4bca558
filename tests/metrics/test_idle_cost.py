"""Cost of a wait: names and expressions have their value; any other text is refused."""

import pytest

from llmtap.cli.options import ReaderOptions
from llmtap.errors import ConfigError
from llmtap.meter.options import MeterOptions
from llmtap.metrics.deadlines import Benefit
from llmtap.metrics.idle_cost import EXPRESSION_CHARACTERS_MAX, check_idle_cost, parse_idle_cost
from llmtap.metrics.slo import SloOptions, check_slos

S = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seconds", 2.0),
        ("tokens", 40.0),
        # The reader could have read 40 tokens: 20 % of the 200.
        ("percent", 20.0),
        ("l", 2.0),
        ("100 * l / (l + V * n)", 100 * 2 / 12),
        ("n * min(1, l / (V * n)) ** 2", 200 * 0.04),
        ("max(0, l - 0.5, +l - 1) + -0", 1.5),
        (" 1e1 * l ** 2 ", 40.0),
        ("2 ** 3 ** 0.5 * l", 2**3**0.5 * 2),
    ],
)
def test_an_expression_has_its_value(text: str, expected: float) -> None:
    assert parse_idle_cost(text).cost(2.0, 0.05, 200) == pytest.approx(expected, rel=1e-12)
    assert Benefit(alpha=3.0, f=text).tokens(200, 2 * S) == pytest.approx(200 - 3 * expected, rel=1e-12)


def test_percent_is_at_most_100() -> None:
    assert parse_idle_cost("percent").cost(3_600.0, 0.05, 1) == 100.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "minutes",
        "L",
        "l +",
        "l, n",
        "l if n else V",
        "l < n",
        "not l",
        "l // V",
        "l % V",
        "lambda: l",
        "__import__('os')",
        "l.real",
        "(l).real()",
        "abs(l)",
        "min(l)",
        "min(*l)",
        "max(l, n, key=V)",
        "min",
        "min(l, default=1)",
        "True",
        "1j * l",
        "'a'",
        "l\n+ n",
        "l # n",
        "[l]",
        "l := n",
        "~l",
        "l @ n",
        "l ** n ** n",
        "1e999",
        "9" * 190 + "** 9",
        "1 / l",
        "l - 1",
        "n - l",
        "0 - l",
        "(l - 1) ** 0.5",
        "l / (V - 0.05)",
        "(" * 100 + "l" + ")" * 99,
        "-" * 199,
        "l" + " + l" * 60,
        f"{'1' * 400}",
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--idle-cost: "):
        check_idle_cost(text, "--idle-cost")


def test_the_longest_nested_expression_is_computed() -> None:
    depth = (EXPRESSION_CHARACTERS_MAX - 1) // 2
    assert parse_idle_cost("(" * depth + "l" + ")" * depth).cost(2.0, 0.05, 1) == 2.0
    assert parse_idle_cost("--" * depth + "l").cost(2.0, 0.05, 1) == 2.0


def test_a_value_that_is_not_finite_is_no_benefit() -> None:
    benefit = Benefit(f="l ** 40")
    assert benefit.tokens(10, 2 * S) == 10 - 5 * 2.0**40
    assert benefit.tokens(10, 10**9 * S) is None


@pytest.mark.parametrize(
    "options", [ReaderOptions(idle_cost="l / V * 2"), MeterOptions(idle_cost="l / V * 2")]
)
def test_options_reach_the_benefit(options: ReaderOptions | MeterOptions) -> None:
    benefit = options.benefit() if isinstance(options, ReaderOptions) else options.benefit
    assert benefit.tokens(100, S) == 100 - 5 * 40
    assert benefit.f_text == "f(l) = l / V * 2"


def test_options_name_the_place_of_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"^--idle-cost: unknown variable 'minutes'"):
        ReaderOptions(idle_cost="minutes").benefit()
    with pytest.raises(ConfigError, match=r"^meter\.idle_cost: unknown variable 'minutes'"):
        MeterOptions(idle_cost="minutes")
    with pytest.raises(ConfigError, match=r"^slo\.chat\.idle_cost: unknown variable 'minutes'"):
        check_slos({"chat": SloOptions(objectives="ttft:1s", target=0.9, idle_cost="minutes")})
