"""What can be said about an experiment, and what each mistake is told."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel import Tap
from llmtap.channel.experiment import (
    Arm,
    Assigner,
    ExperimentOptions,
    read_switch,
    request_unit,
    resolve,
    switch_word,
)
from llmtap.channel.frames import ACK, CONTROL, Closing, FrameKind
from llmtap.config import load_settings
from llmtap.errors import ConfigError
from llmtap.supervisor.supervisor import check_settings
from tests.channel.test_channel import channel
from tests.support.servers.peer import wait_until
from tests.support.servers.proxy import FakeMeter
from tests.support.traffic.experiments import an_experiment

HOUSE = Path(__file__).parents[2]
A, B = {"name": "a"}, {"name": "b", "headers": {"X-Arm": "b"}}
S = 1_000_000_000


def loaded(tmp_path: Path, toml: str) -> ExperimentOptions:
    file = tmp_path / "llmtap.toml"
    file.write_text("[experiment]\n" + toml)
    return load_settings(file, {}, {}).experiment


TWO = '[[experiment.arms]]\nname = "a"\n[[experiment.arms]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("toml", "place", "problem"),
    [
        (TWO, "experiment.arms", "no arm changes requests"),
        (TWO + "headers = {X = '1'}\nbody = {n = 2}", "experiment.arms[1]", "headers and body"),
        (TWO + "headers = {X = '1'}\nupstream = 'http://x'", "experiment.arms[1]", "upstream and headers"),
        (TWO + "headers = {Host = 'x'}", "experiment.arms[1].headers", "an arm cannot set 'Host'"),
        (TWO + "headers = {'X Y' = '1'}", "experiment.arms[1].headers", "'X Y' is not a valid"),
        (TWO + 'headers = {X = "a\\r\\nB: c"}', "experiment.arms[1].headers", "header value"),
        (TWO + "body = {n = nan}", "experiment.arms[1].body.n", "finite"),
        (TWO + "weight = 0", "experiment.arms[1].weight", "above 0"),
        (TWO + "weight = nan", "experiment.arms[1].weight", "finite"),
        (TWO + "wieght = 1", "experiment.arms[1]", "wieght"),
        (TWO + "weight = 'x'", "experiment.arms[1].weight", "expected a number"),
        ("control = 'c'\n" + TWO + "body = {n = 1}", "experiment.control", "'c'"),
        ("control = 'b'\n" + TWO + "body = {n = 1}", "experiment.control", "changes requests"),
        ("unit = 'user'\n" + TWO, "experiment.unit", "user"),
        ("until = 'tomorrow'\n" + TWO, "experiment.until", "tomorrow"),
        ("until = 2026-03-01T12:00:00\n" + TWO, "experiment.until", "time zone"),
        ("name = 'a b'\n" + TWO, "experiment.name", "'a b'"),
        ("key = ''\n" + TWO, "experiment.key", "empty"),
        ("alpha = 0.0\n" + TWO, "experiment.alpha", "0"),
        ("stop_worse = ['ttft.p42']\n" + TWO, "experiment.stop_worse", "'ttft.p42'"),
        ("stop_worse = ['output_tokens']\n" + TWO, "experiment.stop_worse", "'output_tokens'"),
        ("schedule = '1%, 10%'\n" + TWO, "experiment.schedule", "needs experiment.stop_worse"),
        *(
            (f"stop_worse = ['ttft']\nschedule = '{text}'\n" + TWO, "experiment.schedule", problem)
            for text, problem in (
                ("", "not a share"),
                ("1%, 10", "'10'"),
                ("0%", "'0%'"),
                ("50%, 100%", "'100%'"),
                ("nan%", "'nan%'"),
                ("10%, 1%", "above the previous one"),
                ("1%, 1%", "above the previous one"),
                (", ".join(f"{n}%" for n in range(1, 10)), "at most 8"),
            )
        ),
        (
            "stop_worse = ['ttft']\nschedule = '1%'\n"
            + TWO
            + "[[experiment.arms]]\nname = 'c'\nbody = {n = 1}\n",
            "experiment.schedule",
            "exactly two arms, got 3",
        ),
        ("tenant_headers = ['a b']\n", "experiment.tenant_headers", "'a b'"),
        ("aa = true\n[[experiment.arms]]\nname = 'a'\n", "experiment.arms", "got 1"),
        (
            "aa = true\n" + TWO.replace('"b"', '"a"'),
            "experiment.arms[1].name",
            "an earlier arm has the same name",
        ),
        ("aa = true\n" + "[[experiment.arms]]\nname='x'\n" * 9, "experiment.arms", "got 9"),
        (
            "[[experiment.arms]]\nname='a'\nbody={n=1}\n[[experiment.arms]]\nname='b'\nbody={n=2}\n",
            "experiment.arms",
            "the control",
        ),
    ],
)
def test_what_cannot_be_is_told_with_its_key(tmp_path: Path, toml: str, place: str, problem: str) -> None:
    with pytest.raises(ConfigError) as told:
        loaded(tmp_path, toml)
    assert told.value.place.split(" ")[0] == place
    assert problem in told.value.problem


@pytest.mark.parametrize(
    ("toml", "place"),
    [
        ("enabled = true\n", "experiment.arms"),
        (TWO + "upstream = 'gw'", "experiment.arms[1].upstream"),
        (TWO + "upstream = 'http://127.0.0.1:8080'", "experiment.arms[1].upstream"),
    ],
)
def test_what_a_look_at_the_world_finds(tmp_path: Path, toml: str, place: str) -> None:
    file = tmp_path / "llmtap.toml"
    file.write_text("[relay]\nupstream = 'http://gw'\n[experiment]\n" + toml)
    with pytest.raises(ConfigError) as told:
        check_settings(load_settings(file, {}, {}))
    assert told.value.place == place


def test_without_arms_there_is_no_experiment() -> None:
    assert resolve(ExperimentOptions(), "k", 0) is None


@pytest.mark.parametrize(
    ("until", "ends_ns"),
    [
        (None, None),
        ("90s", 1_090 * S),
        ("2h", (1_000 + 7_200) * S),
        ("2026-03-01T12:00:00Z", int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * S),
        ("2026-03-01T14:00:00+02:00", int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * S),
    ],
)
def test_an_end_is_a_date_or_counts_from_the_start(until: str | None, ends_ns: int | None) -> None:
    e = an_experiment(start_wall_ns=1_000 * S, until=until)
    assert e.until_wall_ns == ends_ns
    if ends_ns is not None:
        assert (e.has_ended(ends_ns - 1), e.has_ended(ends_ns)) == (False, True)


def test_a_date_may_be_written_as_toml_knows_dates(tmp_path: Path) -> None:
    options = loaded(tmp_path, "aa = true\nuntil = 2026-03-01T12:00:00Z\n" + TWO)
    e = resolve(options, "k", 0)
    assert e is not None
    assert e.until_wall_ns == int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * S


def test_arms_may_come_from_the_environment() -> None:
    environ = {"LLMTAP_EXPERIMENT_ARMS": '[{"name":"a"},{"name":"b","body":{"n":2}}]'}
    (_, b) = load_settings(None, environ, {"experiment.enabled": "true"}).experiment.arms
    assert b == Arm(name="b", body={"n": 2})


@pytest.mark.parametrize(
    ("arm", "route", "changes"),
    [
        ({}, None, {}),
        ({"upstream": "http://x:1"}, "upstream http://x:1", {"upstream": "http://x:1"}),
        ({"headers": {"X-B": "secret", "X-A": "1"}}, "headers X-A,X-B", {"headers": ["X-A", "X-B"]}),
        ({"body": {"n": 1, "m": "secret"}}, "body m,n", {"body": ["m", "n"]}),
    ],
)
def test_an_arm_says_what_it_changes_and_no_value(
    arm: dict[str, Any], route: str | None, changes: dict[str, object]
) -> None:
    made = Arm(name="x", **arm)
    assert (made.route, made.changes) == (route, changes)


def test_the_control_is_the_first_arm_without_a_change() -> None:
    assert an_experiment(B, A).control == "a"
    assert an_experiment(A, B, {"name": "c"}, control="c").control == "c"
    assert an_experiment(B, A, aa=True).control == "b"


def test_ids_tell_configurations_apart_and_keys_are_only_fingerprinted() -> None:
    e = an_experiment(A, B)
    assert an_experiment(A, B).id == e.id
    others = [
        an_experiment(A, B, key="salt"),
        an_experiment(A, B, enabled=False),
        an_experiment(A, B, aa=True),
    ]
    assert len({e.id, *(o.id for o in others)}) == 4
    assert "pepper" not in e.key_fingerprint
    assert others[0].key_fingerprint != e.key_fingerprint == others[1].key_fingerprint


def test_a_switch_word_cannot_be_an_acknowledgement() -> None:
    for on in (True, False):
        for number in (0, 1, 0xFFFF_FFFF):
            word = switch_word(number, on)
            assert word & CONTROL
            assert word < 1 << 64
            assert read_switch(word) == (number, on)


@given(st.text(), st.text(min_size=1), st.binary(), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_an_assignment_is_a_function_of_key_name_and_unit(
    key: str, name: str, unit: bytes, weights: list[float]
) -> None:
    arm, public = Assigner(key, name, weights).assign(unit)
    assert Assigner(key, name, weights).assign(unit) == (arm, public)
    assert Assigner(key, name, weights).assign(unit)[0] == arm
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
    counts = Counter(assigner.assign(request_unit("r", i))[0] for i in range(n))
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(counts[i] - n * share) < 5 * (n * share * (1 - share)) ** 0.5


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Tap, FakeMeter, list[int]]]:
    """A tap, a meter that acknowledges nothing by itself, and the words that came from it."""
    words: list[int] = []
    async with channel(on_word=words.append) as (traffic, meter):
        meter.acknowledges = False
        yield traffic.tap, meter, words


def whole(tap: Tap) -> None:
    seq, _ = tap.open(1, b"GET / HTTP/1.1\r\n\r\n", arm=b"{}")
    tap.close_exchange(seq, 3, Closing(outcome="complete"))


@pytest.mark.parametrize("step", [1, 3, 8, 13, 1_000])
async def test_words_and_acknowledgements_are_told_apart(step: int) -> None:
    async with listening() as (tap, meter, words):
        whole(tap)
        await wait_until(lambda: FrameKind.CLOSE in meter.exchange(1).kinds)
        last = meter.batches[-1]
        said = [CONTROL, last - 1, CONTROL | 5, last, CONTROL | 1 << 62 | 7]
        data = b"".join(ACK.pack(word) for word in said)
        (link,) = meter.links
        for at in range(0, len(data), step):
            link.transport.write(data[at : at + step])
            await asyncio.sleep(0.001)
        await wait_until(lambda: len(words) == 3)
        assert words == [said[0], said[2], said[4]]
        await wait_until(lambda: tap.ledger.measured == 1)
        assert tap.pending_bytes == 0


async def test_the_arm_follows_the_exchanges_first_frame() -> None:
    async with listening() as (tap, meter, _):
        whole(tap)
        await wait_until(lambda: FrameKind.CLOSE in meter.exchange(1).kinds)
        assert meter.exchange(1).kinds == [FrameKind.OPEN, FrameKind.ARM, FrameKind.CLOSE]
        meter.stop()
        await wait_until(lambda: not tap.connected)
        assert tap.open(1, b"x", arm=b"{}") == (2, False)


@pytest.mark.parametrize("arms", [("a", "b"), ("b", "a")])
def test_stages_have_their_shares_and_ids_and_keep_the_units_of_the_arm(arms: tuple[str, ...]) -> None:
    changed = {"name": "b", "headers": {"X": "1"}}
    ordered = [changed if name == "b" else {"name": "a"} for name in arms]
    e = an_experiment(*ordered, schedule="1%, 12.5 %,50%", stop_worse=("ttft",))
    assert e.stages == (0.01, 0.125, 0.5)
    members: list[set[int]] = []
    for stage, share in enumerate(e.stages):
        of = e.at_stage(stage)
        assert of.shares == {"a": pytest.approx(1 - share), "b": pytest.approx(share)}
        assert e.stage_of(of.id) == stage
        assigner = Assigner("key", "name", [arm.weight for arm in of.arms])
        members.append({n for n in range(4_000) if arms[assigner.assign(b"%d" % n)[0]] == "b"})
        assert abs(len(members[-1]) / 4_000 - share) < 4 * (share * (1 - share) / 4_000) ** 0.5
    assert members[0] < members[1] < members[2]
    assert e.stage_of(e.id + 3) is None and e.stage_of(e.id - 1) is None
    without = an_experiment()
    assert (without.at_stage(0), without.stages, without.stage_of(without.id)) == (without, (), 0)
    assert without.stage_of(without.id + 1) is None
