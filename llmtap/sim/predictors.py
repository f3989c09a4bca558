"""What a scheduler is told of a request's output before it is generated. Seed 004 names no predictor.

- `perfect`: the truth, which bounds what any predictor can give.
- `prompt`: 1.5 x prompt^0.7, whole and within 1 and 4,096, as in the seed's authors' scripts.
- `noisy`: the same times log-normal noise of 0.1.
- `shuffled`: true outputs, each told of another request: the right distribution and no knowledge at all.
"""

from array import array
from collections.abc import Callable
from random import Random
from typing import Final

from llmtap.workload.requests import Requests

__all__ = ["PREDICTORS", "SEEDED", "predict"]

SEEDED: Final = frozenset(("noisy", "shuffled"))
"""Those that draw."""

_LENGTH_MAX: Final = 4_096
_SIGMA: Final = 0.1


def predict(requests: Requests, predictor: str, seed: int | None) -> "array[int]":
    """A column of predicted output tokens. Those of SEEDED want a seed."""
    assert seed is not None or predictor not in SEEDED
    return PREDICTORS[predictor](requests, Random(seed or 0))


def _perfect(requests: Requests, random: Random) -> "array[int]":
    return array("q", requests.output)


def _prompt(requests: Requests, random: Random) -> "array[int]":
    return array("q", [_clamped(1.5 * n**0.7) for n in requests.input])


def _noisy(requests: Requests, random: Random) -> "array[int]":
    noise = random.lognormvariate
    return array("q", [_clamped(1.5 * n**0.7 * noise(0, _SIGMA)) for n in requests.input])


def _shuffled(requests: Requests, random: Random) -> "array[int]":
    told = list(requests.output)
    random.shuffle(told)
    return array("q", told)


def _clamped(length: float) -> int:
    return max(1, min(int(length), _LENGTH_MAX))


PREDICTORS: Final[dict[str, Callable[[Requests, Random], "array[int]"]]] = {
    "perfect": _perfect,
    "prompt": _prompt,
    "noisy": _noisy,
    "shuffled": _shuffled,
}
