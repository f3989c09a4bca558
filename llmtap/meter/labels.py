"""Label values with a bound: the first so many names keep their own series, later ones are `other`.

A name never loses its place: a series that changed its meaning half-way would be worse than `other`.
"""

from typing import Final

__all__ = ["OTHER", "UNKNOWN", "Labels"]

OTHER: Final = "other"
UNKNOWN: Final = "unknown"
"""The model of an exchange that named none."""
PAIRS_MAX: Final = 2_000
"""Tenant and model together: each pair has ten histograms of about 30 series, and windows keep 13 sets."""


class Labels:
    """Folds tenant and model names into bounded sets."""

    def __init__(self, tenants_max: int, models_max: int, pairs_max: int = PAIRS_MAX) -> None:
        self._tenants: set[str] = set()
        self._models: set[str] = set()
        self._pairs: set[tuple[str, str]] = set()
        self._tenants_max = tenants_max
        self._models_max = models_max
        self._pairs_max = pairs_max
        self.overflow: dict[str, int] = {}
        """Exchanges folded into `other`, by label."""

    def fold(self, tenant: str, model: str | None) -> tuple[str, str]:
        """The label values to count an exchange of this tenant and model under."""
        pair = (tenant, UNKNOWN if model is None else model)
        if pair in self._pairs:
            return pair
        tenant = self._place("tenant", pair[0], self._tenants, self._tenants_max)
        model = self._place("model", pair[1], self._models, self._models_max)
        if (tenant, model) not in self._pairs and len(self._pairs) >= self._pairs_max:
            # At most one pair (tenant, other) for each tenant comes on top.
            self._count("model")
            return tenant, OTHER
        self._pairs.add((tenant, model))
        return tenant, model

    def _place(self, label: str, name: str, known: set[str], most: int) -> str:
        if name in known:
            return name
        if len(known) < most:
            known.add(name)
            return name
        self._count(label)
        return OTHER

    def _count(self, label: str) -> None:
        self.overflow[label] = self.overflow.get(label, 0) + 1
