"""Label values with a bound: the first so many names keep their own series, later ones are `other`.

A name never loses its place: a series that changed its meaning half-way would be worse than `other`.
"""

from collections.abc import Iterable
from typing import Final

__all__ = ["DEFAULT", "OTHER", "UNKNOWN", "Labels"]

DEFAULT: Final = "default"
"""The tenant of whoever no rule finds a name for."""
OTHER: Final = "other"
UNKNOWN: Final = "unknown"
"""The model of an exchange that named none."""
MODEL_CHARS_MAX: Final = 128


class Labels:
    """Folds names of tenants, models and arms into bounded sets; `reserved` tenants have their place."""

    def __init__(
        self, tenants_max: int, models_max: int, series_max: int, reserved: Iterable[str] = ()
    ) -> None:
        self._tenants = {OTHER, DEFAULT, *reserved}
        self._models = {OTHER}
        self._series: set[tuple[str, str, str]] = set()
        self._room = tenants_max - (len(self._tenants) - 2)
        """For tenants that nobody told us of beforehand."""
        self._models_max = models_max
        self._series_max = series_max
        self.overflow = {"tenant": 0, "model": 0, "series": 0}
        """Exchanges folded into `other`, by what was full."""

    def tenant(self, name: str, *, trusted: bool = True) -> str:
        """The name to count a tenant under. An untrusted one without a place is given none: `other`."""
        if name in self._tenants:
            return name
        if not trusted:
            return OTHER
        if self._room > 0:
            self._room -= 1
            self._tenants.add(name)
            return name
        self.overflow["tenant"] += 1
        return OTHER

    def fold(self, tenant: str, model: str | None, arm: str | None = None) -> tuple[str, str, str]:
        """The label values to count an exchange under; `tenant` has its place already."""
        model = UNKNOWN if model is None else _visible(model)
        key = (tenant, model, arm or "")
        if key in self._series:
            return key
        if model not in self._models:
            if len(self._models) > self._models_max:
                self.overflow["model"] += 1
                return self._place((tenant, OTHER, key[2]))
            self._models.add(model)
        return self._place(key)

    def _place(self, key: tuple[str, str, str]) -> tuple[str, str, str]:
        if key in self._series or len(self._series) < self._series_max:
            self._series.add(key)
            return key
        # At most one series (tenant, other, arm) for each tenant and arm comes on top.
        self.overflow["series"] += 1
        return key[0], OTHER, key[2]


def _visible(name: str) -> str:
    if len(name) > MODEL_CHARS_MAX:
        name = name[:MODEL_CHARS_MAX]
    return name if name.isprintable() else "".join(c if c.isprintable() else "_" for c in name)
