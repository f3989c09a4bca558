"""Invariant: the values handed out are bounded, and a name that has a place keeps it."""

from hypothesis import given
from hypothesis import strategies as st

from llmtap.meter.labels import OTHER, UNKNOWN, Labels

names = st.sampled_from([f"n{i}" for i in range(12)])


@given(st.lists(st.tuples(names, names), max_size=200))
def test_values_are_bounded_and_stable(asked: list[tuple[str, str]]) -> None:
    labels = Labels(tenants_max=3, models_max=4, pairs_max=6)
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for tenant, model in asked:
        answer = labels.fold(tenant, model)
        assert answer[0] in (tenant, OTHER)
        assert answer[1] in (model, OTHER)
        assert first.setdefault((tenant, model), answer) == answer
    given_out = set(first.values())
    assert len({t for t, _ in given_out}) <= 3 + 1
    assert len({m for _, m in given_out}) <= 4 + 1
    # Each tenant (and `other`) may have its pair with `other` on top.
    assert len(given_out) <= 6 + 4


def test_overflow_is_counted_by_label() -> None:
    labels = Labels(tenants_max=1, models_max=2)
    assert labels.fold("a", "m1") == ("a", "m1")
    assert labels.fold("b", "m1") == (OTHER, "m1")
    assert labels.fold("b", "m2") == (OTHER, "m2")
    assert labels.fold("a", "m3") == ("a", OTHER)
    assert labels.overflow == {"tenant": 2, "model": 1}


def test_a_full_table_of_pairs_folds_the_model() -> None:
    labels = Labels(tenants_max=10, models_max=10, pairs_max=2)
    assert [labels.fold("a", m) for m in ("x", "y", "z", "x")] == [
        ("a", "x"),
        ("a", "y"),
        ("a", OTHER),
        ("a", "x"),
    ]
    assert labels.overflow == {"model": 1}


def test_no_model_is_a_name_of_its_own() -> None:
    assert Labels(5, 5).fold("a", None) == ("a", UNKNOWN)
