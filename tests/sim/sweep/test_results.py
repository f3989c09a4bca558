"""Invariant: what was written down is never lost, and what is no result is never overwritten."""

import resource
from pathlib import Path

import pytest

from llmtap.errors import ConfigError
from llmtap.sim.sweep.runner import Results
from llmtap.sim.sweep.sweep import SweepAttempt

ONE = SweepAttempt("1", {"trace": "a"}, 0.5, {"n": 1})
TWO = SweepAttempt("2", {"trace": "a"}, 0.5, {"n": 2})
FAILED = SweepAttempt("3", {"trace": "a"}, 0.5, error="no")


def written(path: Path, *attempts: SweepAttempt) -> bytes:
    results = Results(path)
    for one in attempts:
        results.add(one)
    results.close()
    return path.read_bytes()


def test_results_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert written(path, ONE, FAILED, TWO).count(b"\n") == 3
    again = Results(path)
    assert again.done == {"1": ONE, "2": TWO}
    assert not again.torn
    again.close()


def test_they_are_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.jsonl")
    results.add(ONE)
    assert (tmp_path / "r.jsonl").read_bytes().endswith(b"\n")
    results.close()


def test_what_failed_and_was_done_later_is_done(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path, FAILED, SweepAttempt("3", {}, 0.5, {"n": 3}))
    again = Results(path)
    assert list(again.done) == ["3"]
    again.close()


def test_wherever_a_line_was_torn_it_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = written(path, ONE, TWO)
    first = whole.index(b"\n") + 1
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        torn = Results(path)
        kept = 1 if end >= first else 0
        assert len(torn.done) == kept
        assert torn.torn is (end not in (0, first))
        torn.add(TWO)
        torn.close()
        assert path.read_bytes() == whole[: first * kept] + whole[first:]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"timestamp,model\n1,2\n", "line 1: is no result of a sweep"),
        (b'{"id":"1"}\n[]\n', "line 2: is no result of a sweep"),
        (b'{"id":"1"}\n{"id":2}\n{"id', "line 2: is no result of a sweep"),
        (b"my only copy", "is no file of results"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as told:
        Results(path)
    assert told.value.place == "--results"
    assert path.read_bytes() == content


def test_only_one_run_at_a_time_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = Results(path)
    with pytest.raises(ConfigError, match="is being written by another run"):
        Results(path)
    first.close()
    Results(path).close()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot open .*: Is a directory"):
        Results(tmp_path)
    with pytest.raises(ConfigError, match="/dev/null is no file that could be read again"):
        Results(Path("/dev/null"))


def test_a_disk_that_takes_no_more_is_said_and_costs_only_the_last(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = written(path, ONE)
    results = Results(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*: File too large"):
            results.add(TWO)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        results.close()
    assert len(path.read_bytes()) == len(whole) + 10
    assert written(path, TWO) == written(tmp_path / "again.jsonl", ONE, TWO)
