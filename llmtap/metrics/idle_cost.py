"""Cost of a wait, f(l) in eq. 7 of the smooth goodput paper: a named function, or an expression of the user.

`parse_idle_cost` checks a text and returns an `IdleCost`. An expression can have numbers, the variables `l`,
`V` and `n`, the operators `+ - * / **`, parentheses, `min` and `max`. Its syntax tree is translated into
functions; it is not run as Python code. The paper says only that f maps l to "the percentage of the benefit";
DEFINITIONS.md has the reasons for the functions here.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final

from llmtap.errors import ConfigError

EXPRESSION_CHARACTERS_MAX: Final = 200
"""Maximum length of an expression that is accepted. It also limits the depth of nested parentheses."""
IDLE_COSTS: Final[Mapping[str, tuple[str, str]]] = {
    "seconds": ("l", "l in seconds"),
    "tokens": ("l / V", "l / V in tokens"),
    "percent": ("100 * min(1, l / (V * n))", "100 min(1, l / (V n)) in percent of the answer's tokens"),
}
"""Names of f, each with its expression and its description."""
_VARIABLES: Final = {
    "l": "user idle latency in seconds",
    "V": "seconds that the reader needs for a token",
    "n": "output tokens",
}
_CHARACTERS: Final = re.compile(r"[0-9A-Za-z_.+\-*/(), ]+")
_HINT: Final = f"expected {', '.join(IDLE_COSTS)}, or an expression such as 100 * l / (l + V * n)"
_Cost = Callable[[float, float, float], float]
_BINARY: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    # math.pow never returns a complex number or a huge integer, unlike the operator **.
    ast.Pow: math.pow,
}
_FUNCTIONS: Final[Mapping[str, Callable[[float, float], float]]] = {"min": min, "max": max}
_SAMPLES: Final = tuple(product((0.0, 1e-3, 1.0, 3_600.0), (1e-3, 0.05, 1.0), (1.0, 2.0, 1e5)))
"""Values of l, V and n with which an expression is checked, from small to large."""


@dataclass(frozen=True, slots=True)
class IdleCost:
    """Cost function f(l) of a wait l."""

    text: str
    """Description of the function, without `f(l) =`."""
    function: _Cost
    """Function of l in seconds, V in seconds, and n."""

    def cost(self, idle_s: float, reader_s_per_token: float, output_tokens: float) -> float | None:
        """Return the cost of a wait; None if the function has no finite value for these arguments."""
        try:
            cost = self.function(idle_s, reader_s_per_token, output_tokens)
        except (ArithmeticError, ValueError):
            return None
        return cost if math.isfinite(cost) else None


@lru_cache(maxsize=64)
def parse_idle_cost(text: str) -> IdleCost:
    """Return the cost function that `text` names, or defines by an expression. Raises ValueError."""
    expression, description = IDLE_COSTS.get(text, (text.strip(" "), text.strip(" ")))
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise ValueError(
            f"the idle cost has {len(expression)} characters, expected at most {EXPRESSION_CHARACTERS_MAX};"
            f" {_HINT}"
        )
    try:
        if not _CHARACTERS.fullmatch(expression):
            raise ValueError  # It is caught below, like the errors of `ast.parse`.
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{text!r} is not a valid idle cost; {_HINT}") from None
    idle_cost = IdleCost(description, _compile(tree.body))
    _check(idle_cost)
    return idle_cost


def check_idle_cost(text: str, place: str) -> None:
    """Raise ConfigError, with the option `place`, unless the text is a name or valid expression of a cost."""
    try:
        parse_idle_cost(text)
    except ValueError as exc:
        raise ConfigError(place, str(exc)) from None


def _compile(node: ast.expr) -> _Cost:
    """Translate a part of an expression into a function. Raises ValueError for unsupported syntax."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _constant(value)
        case ast.Name(id="l"):
            return lambda l_s, v_s, n: l_s
        case ast.Name(id="V"):
            return lambda l_s, v_s, n: v_s
        case ast.Name(id="n"):
            return lambda l_s, v_s, n: n
        case ast.Name(id=name):
            variables = ", ".join(f"{known} ({about})" for known, about in _VARIABLES.items())
            raise ValueError(f"unknown variable {name!r}; {_HINT}; variables: {variables}")
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _compile(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            positive = _compile(operand)
            return lambda l_s, v_s, n: -positive(l_s, v_s, n)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _pair(_BINARY[type(op)], _compile(left), _compile(right))
        case ast.Call(func=ast.Name(id=name), args=[first, second, *others], keywords=[]) if (
            name in _FUNCTIONS
        ):
            chosen = _pair(_FUNCTIONS[name], _compile(first), _compile(second))
            for other in others:
                chosen = _pair(_FUNCTIONS[name], chosen, _compile(other))
            return chosen
    raise ValueError(
        f"{ast.unparse(node)!r} is not supported: use numbers, {', '.join(_VARIABLES)}, + - * / **,"
        f" parentheses, and min and max of two or more values; {_HINT}"
    )


def _constant(value: float) -> _Cost:
    """Return the function of a number in the formula."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"a number in the idle cost is above the maximum of a float; {_HINT}")
    return lambda l_s, v_s, n: number


def _pair(combine: Callable[[float, float], float], left: _Cost, right: _Cost) -> _Cost:
    """Return the function of an operation on two parts of the formula."""
    return lambda l_s, v_s, n: combine(left(l_s, v_s, n), right(l_s, v_s, n))


def _check(idle_cost: IdleCost) -> None:
    """Raise ValueError if f is not finite or below 0 for one of _SAMPLES: a wait must not be a benefit."""
    for l_s, v_s, n in _SAMPLES:
        cost = idle_cost.cost(l_s, v_s, n)
        arguments = f"for l = {l_s:g}, V = {v_s:g}, n = {n:g}"
        if cost is None:
            raise ValueError(
                f"{idle_cost.text!r} has no finite value {arguments}; do not divide by l, which can be 0"
            )
        if cost < 0:
            raise ValueError(
                f"{idle_cost.text!r} is {cost:g} {arguments}, but must be 0 or more; use max(0, ...)"
            )
