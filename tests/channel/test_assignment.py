"""Who gets which arm: fair, sticky, auditable."""

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.experiment import Assigner, request_unit


@given(st.text(), st.text(min_size=1), st.binary(), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_an_assignment_is_a_function_of_key_name_and_unit(
    key: str, name: str, unit: bytes, weights: list[float]
) -> None:
    arm, public = Assigner(key, name, weights).assign(unit)
    assert Assigner(key, name, weights).assign(unit) == (arm, public)
    assert Assigner(key, name, weights).arm(unit) == arm
    assert 0 <= arm < len(weights)
    assert len(public) == 16


def test_it_can_be_worked_out_again_by_the_definition() -> None:
    """A second implementation, from the module's words."""
    secret = blake2b(b"salt").digest()
    for i in range(200):
        raw = blake2b(b"exp\0" + b"u%d" % i, digest_size=16, key=secret).digest()
        point = int.from_bytes(raw[:8], "big") / 2**64
        expected = 0 if point < 0.2 else 1 if point < 0.5 else 2
        assert Assigner("salt", "exp", [2, 3, 5]).assign(b"u%d" % i) == (expected, raw[8:].hex())


@pytest.mark.parametrize("weights", [[1, 1], [9, 1], [1, 2, 3], [0.001, 0.999]])
def test_arms_get_their_shares(weights: list[float]) -> None:
    n = 40_000
    assigner = Assigner("k", "e", weights)
    counts = Counter(assigner.arm(request_unit("r", i)) for i in range(n))
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(counts[i] - n * share) < 5 * (n * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(("key", "name"), [("other", "e"), ("k", "other")])
def test_another_key_or_name_deals_anew(key: str, name: str) -> None:
    one, other = Assigner("k", "e", [1, 1]), Assigner(key, name, [1, 1])
    same = sum(one.arm(b"%d" % i) == other.arm(b"%d" % i) for i in range(10_000))
    assert 4_700 < same < 5_300, "independent of each other"


def test_more_weight_for_the_last_arm_moves_nobody_else_about() -> None:
    """Ramping an arm up takes units from its neighbour and from no one else."""
    small, large = Assigner("k", "e", [90, 10]), Assigner("k", "e", [50, 50])
    moves = Counter((small.arm(b"%d" % i), large.arm(b"%d" % i)) for i in range(5_000))
    assert moves[1, 0] == 0
    assert moves[1, 1] > 0


def test_a_units_public_id_says_nothing_of_its_arm() -> None:
    assigner = Assigner("k", "e", [1, 1])
    low = Counter(assigner.assign(b"%d" % i)[0] for i in range(10_000) if assigner.assign(b"%d" % i)[1] < "8")
    assert 0.47 < low[0] / (low[0] + low[1]) < 0.53


def test_a_request_is_named_as_its_exchange() -> None:
    assert request_unit("ab.0.1", 7) == b"ab.0.1-7"
