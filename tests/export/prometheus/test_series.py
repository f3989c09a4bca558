"""Every family of the table is fed, named by Prometheus's rules, and has edges that rise."""

import re

import pytest

from llmtap.export.prometheus.series import COUNTERS, HISTOGRAMS, families_for
from llmtap.metrics.objectives import BOUNDS


@pytest.mark.parametrize("name", [*HISTOGRAMS, *COUNTERS])
def test_names_follow_the_rules(name: str) -> None:
    family = HISTOGRAMS.get(name) or COUNTERS[name]
    assert re.fullmatch(r"llmtap_[a-z_]+", family.name)
    assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert "\n" not in family.help
    assert "\\" not in family.help
    if name in HISTOGRAMS:
        # Base units, as the last word.
        assert family.name.endswith(("_seconds", "_tokens"))


def test_edges_rise_also_with_bounds_among_them() -> None:
    for bounds in ([], [(name, 12_345_678) for name in BOUNDS]):
        for family in families_for(bounds).values():
            assert list(family.edges) == sorted(set(family.edges))


def test_every_bound_but_that_of_a_spread_is_an_edge_somewhere() -> None:
    plain = families_for([])
    for name in BOUNDS:
        changed = [key for key, family in families_for([(name, 12_345_678)]).items() if family != plain[key]]
        assert bool(changed) == (name != "jitter"), name
