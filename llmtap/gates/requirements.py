"""Requirements on the figures of a result: `--require "attainment>=0.99 ttft_p99<=500ms error_rate<=1%"`.

`Requirements.parse` reads the requirements, and `judge` compares a result with each of them. `judge` returns
rows, which `report/gates.py` declares and renders. A requirement is `met`, `missed`, or `not_valid` if its
figure is missing or not valid. `exit_code` returns the exit code of a command: only figures with a
requirement must be valid. With a requirement on `error_rate`, the load has failed only if all requests
failed.
"""

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from llmtap.errors import ConfigError, ExitCode
from llmtap.gates.figures import FigureRow, FigureUnit, check_objectives, figure_named, validity_of
from llmtap.report.gates import RequirementRow
from llmtap.units import NS_PER_S, parse_duration_ns

_Json = Mapping[str, Any]
_CONDITION: Final = re.compile(r"[\s,]*([A-Za-z][\w.]*)\s*(<=|>=|<|>)\s*([^\s,]+)")
_OPERATORS: Final = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?|\.\d+", re.ASCII)
EXAMPLE: Final = "attainment>=0.99 ttft_p99<=500ms error_rate<=1%"
_NO_TOKENS: Final = "no_tokens"
"""Kind of the finding that no answer had a token. It always makes the result not valid."""
_FAILED: Final = "failed"
"""Kind of the finding about failed requests; its `figure` is the share of failed requests."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure, an operator and a bound, such as `ttft_p99<=500ms`."""

    text: str
    figure: FigureRow
    operator: str
    bound: float
    """Value that the figure is compared with."""

    def is_met_by(self, value: float) -> bool:
        return bool(_OPERATORS[self.operator](value, self.bound))


def parse_bound(text: str, figure: FigureRow, place: str) -> float:
    """Parse a bound such as `500ms`, `1%` or `12.5` as seconds, a share or a number. Raises ConfigError."""
    if figure.unit is FigureUnit.TIME:
        if text[-1:].isdigit():
            problem = f"{figure.name}: expected a duration with a unit, got {text!r}"
            raise ConfigError(place, problem, "such as 500ms")
        try:
            return parse_duration_ns(text) / NS_PER_S
        except ValueError:
            problem = f"{figure.name}: {text!r} is not a valid duration"
            raise ConfigError(place, problem, "such as 500ms") from None
    digits, percent, rest = text.partition("%")
    share = figure.unit is FigureUnit.SHARE
    # Compute with Decimal, because float("99.9") / 100 is greater than 999 / 1000.
    exact = Decimal(digits) / (100 if percent else 1) if _NUMBER.fullmatch(digits) and not rest else -1
    value = float(exact)
    if value < 0 or (percent and not share) or (share and value > 1):
        expected = "a share from 0 to 1, or 0% to 100%" if share else "a number of at least 0"
        raise ConfigError(place, f"{figure.name}: expected {expected}, got {text!r}", f"such as {EXAMPLE!r}")
    return value


def parse_conditions(texts: Iterable[str], place: str) -> Iterator[Condition]:
    """Yield the conditions in texts, in which blanks or commas separate them. Raises ConfigError."""
    for text in texts:
        begin = 0
        while text[begin:].strip(" ,\t\n"):
            match = _CONDITION.match(text, begin)
            if match is None:
                rest = text[begin:].strip()
                raise ConfigError(
                    place,
                    f"expected FIGURE, one of <= >= < >, and a bound, got {rest!r}",
                    f"such as {EXAMPLE!r}",
                )
            name, symbol, bound = match.groups()
            figure = figure_named(name, place)
            yield Condition(f"{name}{symbol}{bound}", figure, symbol, parse_bound(bound, figure, place))
            begin = match.end()


@dataclass(frozen=True, slots=True)
class Requirements:
    """Conditions of `--require`, all of which a result must meet."""

    conditions: tuple[Condition, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str] | None, place: str = "--require") -> "Requirements":
        """Parse the values of the option `place`. Raises ConfigError, which names the invalid requirement."""
        conditions = tuple(parse_conditions(texts or (), place))
        for condition in conditions:
            _check_share(condition, place)
        if texts and not conditions:
            raise ConfigError(place, "expected a requirement, got an empty text", f"such as {EXAMPLE!r}")
        return cls(conditions)

    def __bool__(self) -> bool:
        return bool(self.conditions)

    @property
    def percentiles(self) -> dict[str, float]:
        """Return the percentiles in the figures of the conditions, in the form of `parse_percentiles`."""
        return {name: p for one in self.conditions for name, p in one.figure.percentiles.items()}

    def check_objectives(self, objectives: str | None, place: str = "--require") -> None:
        """Raise ConfigError if a requirement needs objectives and there are none."""
        check_objectives({one.figure.name: one.figure for one in self.conditions}, objectives, place)

    def judge(self, result: _Json, label: str = "") -> list[RequirementRow]:
        """Compare a result with each requirement. `label`: name of the run or test."""
        return [_judged_requirement(one, result, label) for one in self.conditions]

    def add_to(self, result: MutableMapping[str, Any], label: str = "") -> list[RequirementRow]:
        """Add the judged requirements to a result as `requirements`, if there are any, and return them."""
        rows = self.judge(result, label)
        if rows:
            result["requirements"] = rows
        return rows


def _check_share(condition: Condition, place: str) -> None:
    """Raise ConfigError if every share from 0 to 1 meets a condition, or none does: in `error_rate<=1`, the
    user probably means 1 %, but 1 is 100 %."""
    if condition.figure.unit is not FigureUnit.SHARE or condition.is_met_by(0.0) != condition.is_met_by(1.0):
        return
    often = "always" if condition.is_met_by(1.0) else "never"
    hint = (
        f"1 is 100%; for one per cent, write {condition.figure.name}{condition.operator}1%"
        if condition.bound == 1
        else "use a bound between 0 and 1, such as 0.01 or 1%"
    )
    raise ConfigError(place, f"{condition.text!r} is {often} met by a share from 0 to 1", hint)


def _judged_requirement(condition: Condition, result: _Json, label: str) -> RequirementRow:
    value, validity = condition.figure.value(result), validity_of(condition.figure, result)
    if value is None or validity.state == "not_valid":
        state = "not_valid"
    else:
        state = "met" if condition.is_met_by(value) else "missed"
    return RequirementRow(
        of=label,
        requirement=condition.text,
        figure=condition.figure.name,
        value=value,
        bound=condition.bound,
        unit=condition.figure.unit.value,
        state=state,
        validity=validity.state,
        reason=validity.reason,
        few=condition.figure.has_few_samples(result),
    )


def exit_code(verdict: _Json | None, rows: Sequence[RequirementRow], *, missed: bool = False) -> ExitCode:
    """Return the exit code for a result with this verdict and these judged requirements.

    `missed`: whether a gate other than these requirements was missed.
    """
    verdict = verdict or {}
    if not rows:
        return ExitCode.of_run(
            failed=bool(verdict.get("failed")), missed=missed, not_valid=not verdict.get("valid", True)
        )
    return ExitCode.of_run(
        failed=load_failed(verdict, limited=any(row.figure == "error_rate" for row in rows)),
        missed=missed or any(row.state == "missed" for row in rows),
        not_valid=any(row.state == "not_valid" for row in rows)
        or any(one["what"] == _NO_TOKENS for one in verdict.get("findings") or ()),
    )


def load_failed(verdict: _Json, *, limited: bool) -> bool:
    """Return whether the load failed.

    `limited`: a gate limits the failed requests; then the load has failed only if all requests failed.
    """
    return any(
        one.get("failed") and not (limited and one["what"] == _FAILED and one["figure"] < 1)
        for one in verdict.get("findings") or ()
    )
