"""Hartigans' dip: how far a sample is from any distribution with one mode, and how likely that is by chance.

The dip is the least distance, over all unimodal distributions, between the sample's distribution function and
theirs: 1 / (2 n) at least, 1/4 at most. A unimodal function is convex up to its mode and concave after. So
the greatest convex minorant and the least concave majorant of the sample's function are compared where they
are furthest apart, and again within the modal interval that this leaves, until nothing is gained.

p is for the uniform distribution, the hardest of all unimodal ones to tell from two modes, so for others the
test is right less often than alpha. It takes values for independent.

Written from the papers, because the packages at hand are under the GPL. Minorants are isotonic regressions of
slopes, which SciPy has. Tested against linear programs that know only the definition, and R's published
tables.

Source: Hartigan and Hartigan 1985, "The dip test of unimodality", Annals of Statistics 13.
"""

from collections.abc import Sequence
from math import log, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

__all__ = ["DIP_SHARES", "DIP_SIZES", "VALUES_MIN", "dip", "dip_p"]

Values = NDArray[np.float64]
Places = NDArray[np.int_]

VALUES_MIN: Final = 4
"""Of fewer the dip is 1 / (2 n), whatever they are."""
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
    """The dip of values in any order, one at least. Equal ones are a step of that height, as they are."""
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    n = int(counts.sum())
    upto: Values = np.concatenate(([0.0], np.cumsum(counts, dtype=float)))
    # Between 0 and 1, or differences of nanoseconds in seconds would lose their digits.
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
    """The greatest convex function below the points, at each x; and the places of the points it touches."""
    widths = np.diff(x)
    corners: Places = isotonic_regression(np.diff(heights) / widths, weights=widths).blocks
    return np.interp(x, x[corners], heights[corners]), corners


def dip_p(found: float, n: int) -> float:
    """The chance that n uniform values have such a dip or a greater one; 0.0005 stands for that or less.

    Interpolated between the rows and columns of a table by simulation; sqrt(n) dip is taken to change no more
    from 5,000 values on (by 0.5 % up to 20,000, says R's table).
    """
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
