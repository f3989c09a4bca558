"""Shape of a distribution of latencies: number and position of modes, and the tail (IETF draft, 5.4.4.3).

`dip_test`, `modes` and `tail` take a sequence of values; the ITL test of `llmtap bench` calls them.
Hartigans' dip is the least distance between the sample's distribution function and a unimodal one: from 1 /
(2 n) to 1/4. p is for the uniform distribution. Values are taken as independent. Own code, because the
available packages are under the GPL.

Source: Hartigan and Hartigan 1985, "The dip test of unimodality", Annals of Statistics 13.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, signal, stats
from scipy.optimize import isotonic_regression

from llmtap.metrics.statistics import tail_ratio

Values = NDArray[np.float64]


Places = NDArray[np.int_]

VALUES_MIN: Final = 4
"""With fewer values the dip is always 1 / (2 n)."""
DIP_SIZES: Final = (4, 6, 8, 10, 15, 20, 30, 50, 100, 200, 500, 1_000, 2_000, 5_000)
DIP_SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995)
# fmt: off
_DIP_TABLE: Final = (
    (.2500, .2500, .2500, .2500, .2500, .2863, .3721, .4117, .4463, .4628, .4736, .4834, .4892, .4919),
    (.2041, .2041, .2041, .2413, .3016, .3547, .3894, .4034, .4381, .4675, .4929, .5227, .5374, .5503),
    (.1768, .2099, .2327, .2730, .3140, .3475, .4015, .4364, .4700, .4886, .5047, .5261, .5487, .5724),
    (.1922, .2274, .2466, .2783, .3091, .3605, .4124, .4412, .4764, .5026, .5257, .5555, .5720, .5846),
    (.2114, .2360, .2487, .2785, .3235, .3717, .4255, .4594, .4969, .5267, .5505, .5843, .6073, .6271),
    (.2127, .2358, .2546, .2871, .3280, .3808, .4355, .4707, .5118, .5429, .5678, .5970, .6253, .6515),
    (.2177, .2442, .2601, .2932, .3368, .3898, .4452, .4825, .5258, .5592, .5836, .6152, .6425, .6730),
    (.2202, .2495, .2671, .3005, .3464, .4013, .4578, .4954, .5415, .5750, .6014, .6357, .6613, .6774),
    (.2276, .2560, .2738, .3081, .3553, .4125, .4723, .5116, .5590, .5922, .6211, .6610, .6811, .7056),
    (.2330, .2625, .2802, .3157, .3624, .4204, .4808, .5210, .5702, .6019, .6317, .6768, .7099, .7333),
    (.2376, .2662, .2850, .3205, .3681, .4262, .4889, .5289, .5809, .6114, .6412, .6806, .7026, .7335),
    (.2420, .2700, .2884, .3238, .3717, .4310, .4937, .5342, .5852, .6218, .6538, .6924, .7239, .7512),
    (.2421, .2714, .2895, .3256, .3738, .4324, .4955, .5360, .5888, .6261, .6610, .7015, .7300, .7519),
    (.2442, .2738, .2922, .3278, .3763, .4344, .4977, .5413, .5926, .6361, .6654, .7050, .7375, .7615),
)
# fmt: on
"""For each of DIP_SIZES the quantiles, at DIP_SHARES, of sqrt(n) times the dip of n uniform values: 30,000
samples a row, of the last two 20,000. Made by `benchmarks/statistics/known_answers.py --dip-table`."""
_ROUNDED: Final = 1 + 1e-9


def dip(values: Sequence[float] | Values) -> float:
    """Return the dip of at least one value, in any order."""
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    n = int(counts.sum())
    upto: Values = np.concatenate(([0.0], np.cumsum(counts, dtype=float)))
    # Scaled to 0..1, because differences of nanoseconds in seconds would lose their digits.
    x: Values = (distinct - distinct[0]) / ((distinct[-1] - distinct[0]) or 1.0)
    first, last = 0, len(x) - 1
    found = 1.0  # n times twice the dip: a step of one value is half its height from any continuous function
    while first < last:
        lower, upper = upto[first : last + 1], upto[first + 1 : last + 2]
        minorant, convex = _minorant(x[first : last + 1], lower)
        majorant, concave = _minorant(x[first : last + 1], -upper)
        majorant = -majorant
        apart = majorant - minorant
        at_convex, at_concave = int(convex[apart[convex].argmax()]), int(concave[apart[concave].argmax()])
        if max(apart[at_convex], apart[at_concave]) <= found:
            break
        if apart[at_convex] >= apart[at_concave]:
            left = at_convex
            right = int(concave[np.searchsorted(concave, left, "left")])
        else:
            right = at_concave
            left = int(convex[np.searchsorted(convex, right, "right") - 1])
        before = (upper - minorant)[:left].max(initial=0.0)
        after = (majorant - lower)[right + 1 :].max(initial=0.0)
        found = max(found, float(before), float(after))
        if (left, right) == (0, last - first):
            break
        first, last = first + left, first + right
    return found / (2 * n)


def _minorant(x: Values, heights: Values) -> tuple[Values, Places]:
    """Return the greatest convex function below the points, at each x, and where it touches them."""
    widths = np.diff(x)
    corners: Places = isotonic_regression(np.diff(heights) / widths, weights=widths).blocks
    return np.interp(x, x[corners], heights[corners]), corners


def dip_p(found: float, n: int) -> float:
    """Return the chance that n uniform values have such a dip or a greater one; 0.0005 means that or less."""
    if n < VALUES_MIN:
        return 1.0
    place = np.interp(log(n), np.log(DIP_SIZES), np.arange(len(DIP_SIZES)))
    row = int(min(place, len(DIP_SIZES) - 2))
    part = float(place) - row
    limits = (1 - part) * np.asarray(_DIP_TABLE[row]) + part * np.asarray(_DIP_TABLE[row + 1])
    scaled = sqrt(n) * found
    if scaled <= limits[0] * _ROUNDED:
        return 1.0
    # Tails fall off like exponentials: straight lines between logarithms of p.
    beyond = np.log(1 - np.asarray(DIP_SHARES))
    return float(np.exp(np.interp(scaled, limits, beyond)))


GRID: Final = 2_048
WIDE: Final = 10.0
"""Ratio of greatest to least value from which modes are looked for on a logarithmic scale."""
OUTERMOST: Final = 0.002
"""Share of the values left out on either side."""
MODE_SHARE_MIN: Final = 0.01
"""Least share of the values that a mode has above the level of its valleys."""
MODE_VALUES_MIN: Final = 10
MODE_ERRORS_MIN: Final = 4.0
"""Standard errors of that number which it must exceed, or it may be random."""
_ALMOST: Final = 1 - 1e-9
TAIL_SHARE: Final = 0.1
"""Share of the values, the greatest, that form the tail."""
TAIL_VALUES_MIN: Final = 50
"""With fewer values any shape fits."""
TAIL_VALUES_MAX: Final = 2_000
"""With more values the tail begins further out."""


@dataclass(frozen=True, slots=True)
class Dip:
    dip: float
    """Distance to the nearest unimodal distribution: 1/4 is two points, 0.01 is hardly visible."""
    p: float
    n: int
    unimodal: bool


def dip_test(
    values: Sequence[float], *, alpha: float = 0.05, n_max: int = 20_000, seed: int = 0, grain: float = 0.0
) -> Dip | None:
    """Test whether the values may have come from one mode; None below 4 values.

    Small modes (2 % of the values) are missed: `modes` names those. Above `n_max` values a sample is drawn.
    Values that are alike within a request make p too small: look at `dip`, too.

    Args:
        grain: rounding of the values, in their unit, over which they are spread evenly; 0: they are exact.
    """
    data = np.asarray(values, dtype=float)
    random = np.random.default_rng(seed)
    if len(data) > n_max:
        data = random.choice(data, n_max, replace=False)
    n = len(data)
    if n < VALUES_MIN:
        return None
    if grain:
        data = data + random.uniform(-grain / 2, grain / 2, n)
    found = dip(data)
    p = dip_p(found, n)
    return Dip(found, p, n, p >= alpha)


def modes(values: Sequence[float]) -> list[float]:
    """Return the peaks of the density of the values, ascending; for people, after `dip_test`.

    Gaussian kernel of Silverman's width, on a logarithmic scale if values are above 0 and spread over more
    than a factor of 10. Zeros are a place of their own. A peak has at least 1 % of the values above its
    valleys.
    """
    data = np.asarray(values, dtype=float)
    if not len(data):
        return []
    enough = max(MODE_VALUES_MIN, MODE_SHARE_MIN * len(data))
    positive = data[data > 0]
    if len(positive) and (data == 0).sum() >= enough:
        return [0.0, *_places(positive, enough)]
    return _places(data, enough)


def _places(data: Values, enough: float) -> list[float]:
    low, high = (
        np.quantile(data, OUTERMOST, method="lower"),
        np.quantile(data, 1 - OUTERMOST, method="higher"),
    )
    inner = data[(data >= low) & (data <= high)]
    if low > 0 and high > WIDE * low:
        return [float(np.exp(x)) for x in _peaks(np.log(inner), enough)]
    return _peaks(inner, enough)


def _peaks(data: Values, enough: float) -> list[float]:
    spread = min(float(data.std()), float(stats.iqr(data)) / 1.349) or float(data.std())
    low, high = float(data.min()), float(data.max())
    if not spread or low == high:
        return [low]
    width = 0.9 * spread * len(data) ** -0.2
    low, high = low - 4 * width, high + 4 * width
    cell = max((high - low) / GRID, width / 20)
    cells = int((high - low) / cell) + 1
    counts, edges = np.histogram(data, bins=cells, range=(low, low + cells * cell))
    density = ndimage.gaussian_filter1d(counts.astype(float), width / cell, mode="constant", truncate=4)
    found, about = signal.find_peaks(density, prominence=0)
    kept = []
    for place, depth in zip(found, about["prominences"], strict=True):
        level = density[place] - depth * _ALMOST  # not just below its valley by rounding
        down = np.flatnonzero(density <= level)
        after = int(np.searchsorted(down, place))
        left = down[after - 1] + 1 if after else 0
        right = down[after] if after < len(down) else len(density)
        mass = float(density[left:right].sum())
        if mass - level * (right - left) >= max(enough, MODE_ERRORS_MIN * sqrt(mass)):
            kept.append(float((edges[place] + edges[place + 1]) / 2))
    return kept or [float(np.median(data))]


@dataclass(frozen=True, slots=True)
class Tail:
    ratio: float | None
    """P99 / P50 (5.4.4.3); None without values, or where half of them are 0."""
    kind: Literal["light", "exponential", "heavy"] | None
    """Lighter than an exponential, not distinguishable from it, or heavier: the interval of `shape` lies
    below 0, across it, or above; None with fewer than 50 values in the tail (500 in all)."""
    shape: float | None
    """Of the generalised Pareto distribution fitted to the values above `threshold`: 0 is an exponential
    tail, above it a power of 1 / shape, below it one that ends."""
    low: float | None
    high: float | None
    threshold: float | None
    n: int


def tail(values: Sequence[float]) -> Tail:
    """Return the tail of values in any order: the greatest tenth of them, 2,000 at most.

    By maximum likelihood, for independent values. Source: Pickands 1975, and Smith 1987 (the interval).
    """
    data = np.sort(np.asarray(values, dtype=float))
    if not len(data):
        return Tail(None, None, None, None, None, None, 0)
    p50, p99 = np.quantile(data, (0.5, 0.99))
    ratio = tail_ratio(float(p50), float(p99))
    n = min(int(len(data) * TAIL_SHARE), TAIL_VALUES_MAX)
    if n < TAIL_VALUES_MIN:
        return Tail(ratio, None, None, None, None, None, n)
    threshold = float(data[-n - 1])
    beyond = data[-n:] - threshold
    if beyond[0] == beyond[-1]:  # one value: it ends there
        return Tail(ratio, "light", None, None, None, threshold, n)
    shape, _, _ = stats.genpareto.fit(beyond / beyond.mean(), 0.1, floc=0)
    reach = float(stats.norm.ppf(0.975)) * max(0.0, 1 + shape) / sqrt(n)
    low, high = float(shape - reach), float(shape + reach)
    kind: Literal["light", "exponential", "heavy"] = (
        "heavy" if low > 0 else "light" if high < 0 else "exponential"
    )
    return Tail(ratio, kind, float(shape), low, high, threshold, n)
