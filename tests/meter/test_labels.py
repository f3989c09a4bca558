"""Invariant: the values handed out are bounded, and a name that has a place keeps it."""

from hypothesis import given
from hypothesis import strategies as st

from llmtap.meter.tenants import DEFAULT, OTHER, UNKNOWN, Labels

names = st.sampled_from([f"n{i}" for i in range(12)])


@given(st.lists(st.tuples(names, names, st.sampled_from([None, "a", "b"])), max_size=200))
def test_values_are_bounded_and_stable(asked: list[tuple[str, str, str | None]]) -> None:
    labels = Labels(tenants_max=3, models_max=4, series_max=6)
    first: dict[tuple[str, str, str | None], tuple[str, str, str]] = {}
    for name, model, arm in asked:
        tenant = labels.tenant(name)
        answer = labels.fold(tenant, model, arm)
        assert answer[0] in (name, OTHER)
        assert answer[1] in (model, OTHER)
        assert answer[2] == (arm or "")
        assert first.setdefault((name, model, arm), answer) == answer
    given_out = set(first.values())
    assert len({t for t, _, _ in given_out}) <= 3 + 1
    assert len({m for _, m, _ in given_out}) <= 4 + 1
    # Each tenant (and `other`) may have its series with the model `other` on top, in each arm.
    assert len(given_out) <= 6 + 4 * 3


def test_overflow_is_counted_by_label() -> None:
    labels = Labels(tenants_max=1, models_max=2, series_max=100)
    assert [labels.tenant(name) for name in ("a", "b", "a", "c")] == ["a", OTHER, "a", OTHER]
    assert labels.fold("a", "m1") == ("a", "m1", "")
    assert labels.fold("a", "m2") == ("a", "m2", "")
    assert labels.fold("a", "m3") == ("a", OTHER, "")
    assert labels.overflow == {"tenant": 2, "model": 1, "series": 0}


def test_a_full_table_of_series_folds_the_model() -> None:
    labels = Labels(tenants_max=10, models_max=10, series_max=2)
    assert [labels.fold("a", m)[:2] for m in ("x", "y", "z", "x")] == [
        ("a", "x"), ("a", "y"), ("a", OTHER), ("a", "x"),
    ]  # fmt: skip
    assert labels.overflow["series"] == 1


def test_no_model_is_a_name_of_its_own() -> None:
    assert Labels(5, 5, 5).fold("a", None) == ("a", UNKNOWN, "")


def test_tenants_told_beforehand_have_their_place_and_so_has_the_default() -> None:
    labels = Labels(tenants_max=2, models_max=1, series_max=9, reserved=["acme"])
    assert [labels.tenant(n) for n in ("first", "second", "acme", DEFAULT)] == [
        "first",
        OTHER,
        "acme",
        DEFAULT,
    ]


def test_whoever_the_gateway_does_not_know_takes_no_place() -> None:
    labels = Labels(tenants_max=1, models_max=1, series_max=9)
    assert labels.tenant("guess", trusted=False) == OTHER
    assert labels.tenant("real") == "real"
    assert labels.tenant("real", trusted=False) == "real"
    assert labels.overflow["tenant"] == 0


def test_a_models_name_is_visible_and_short() -> None:
    labels = Labels(1, 9, 9)
    assert labels.fold("t", "a\nb")[1] == "a_b"
    assert len(labels.fold("t", "m" * 10_000)[1]) == 128
