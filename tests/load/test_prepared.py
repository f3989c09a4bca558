"""Prepared bodies are those that were made, whoever reads them, and identical ones are there once."""

import errno
import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyMaker, BodyOptions, Prepared, prepare
from llmtap.workload.prompts.fitting import RowPrompts
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import count_tokens
from llmtap.workload.prompts.tokenizer import OwnTokenizer, TextCounter
from llmtap.workload.requests import Requests

MAKER = BodyMaker(BodyOptions(model="m", usage=False))


class Said:
    """Says these texts, by row."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def prompt(self, row: int) -> Prompt:
        return Prompt(text=self._texts[row])


def rows_of(n: int, tokens: int = 10) -> Requests:
    return Requests(array("q", range(n)), array("q", [tokens] * n), array("q", range(1, n + 1)))


@settings(max_examples=30)
@given(st.lists(st.text(max_size=200), max_size=40))
def test_each_row_gets_its_body_back(texts: list[str]) -> None:
    requests = rows_of(len(texts))
    with prepare(requests, Said(texts), MAKER) as prepared:
        wanted = [MAKER.body(Prompt(text=text), requests.output[row]) for row, text in enumerate(texts)]
        assert [prepared.body(row) for row in range(len(prepared))] == wanted
        assert len(prepared) == len(texts)
        assert prepared.bytes_total == sum(map(len, wanted))
        assert prepared.bytes_stored == sum(map(len, set(wanted)))
        assert list(prepared.tokens) == [-1] * len(texts)
        assert prepared.lengths.n == 0


def test_identical_bodies_are_there_once() -> None:
    requests = rows_of(500)
    requests.output = array("q", [7] * 500)
    with prepare(requests, Said(["one text"] * 500), MAKER) as prepared:
        body = MAKER.body(Prompt(text="one text"), 7)
        assert {prepared.body(row) for row in range(500)} == {body}
        assert (prepared.bytes_stored, prepared.bytes_total) == (len(body), 500 * len(body))


def test_a_trace_keeps_its_own_bodies_and_the_rest_is_made() -> None:
    requests = rows_of(4, 30)
    requests.bodies = [b'{"model":"m","stream":true,"a":1}', b"", b'{"model":"x","a": 2 }', b""]
    prompts = RowPrompts(requests, TextCounter(OwnTokenizer()))
    with prepare(requests, prompts, MAKER) as prepared:
        assert prepared.body(0) == requests.bodies[0]
        assert prepared.body(2) == b'{"model":"m","a":2,"stream":true}'
        assert prepared.body(3) == MAKER.body(prompts.prompt(3), 4)
        assert list(prepared.tokens) == [-1, 30, -1, 30]
        assert prepared.lengths.describe() == {
            "n": 2, "exact": 2, "missed_min": 0, "missed_max": 0, "ways": {"reference tokenizer": 2},
        }  # fmt: skip


def test_a_row_with_neither_body_nor_prompt_is_named() -> None:
    requests = rows_of(2)
    requests.bodies = [b"{}", b""]
    with pytest.raises(ConfigError, match="row 1 has neither a body nor a prompt"):
        prepare(requests, None, MAKER)
    requests.bodies = [b"{}", b'{"a":1}']
    with prepare(requests, None, MAKER) as prepared:
        assert len(prepared) == 2


def test_what_was_missed_is_told() -> None:
    requests = rows_of(3)
    requests.input = array("q", [100, 5, 2])
    source = RowPrompts(requests, TextCounter(OwnTokenizer()), system="a b c d e")
    with prepare(requests, source, MAKER) as prepared:
        assert (prepared.lengths.n, prepared.lengths.exact) == (3, 1)
        assert prepared.lengths.missed_max == prepared.tokens[2] - 2 > 0
        assert prepared.lengths.missed_min == 0


def test_progress_goes_up_to_all() -> None:
    told: list[tuple[int, int]] = []
    with prepare(rows_of(1_000, 500), Said(["x"] * 1_000), MAKER, lambda *told_: told.append(told_)):
        pass
    assert told[-1] == (1_000, 1_000)
    assert len(told) > 3
    assert told == sorted(told)


def test_no_rows_are_no_bodies() -> None:
    with prepare(Requests(), None, MAKER) as prepared:
        assert (len(prepared), prepared.bytes_total, prepared.bytes_stored) == (0, 0, 0)


CHILD = """
import os, sys
fd, begin, end = map(int, sys.argv[1:])
sys.stdout.buffer.write(os.pread(fd, end - begin, begin))
"""


def read_by_a_child(prepared: Prepared, row: int) -> bytes:
    given = [str(n) for n in (prepared.fd, prepared.begins[row], prepared.ends[row])]
    return subprocess.run(
        [sys.executable, "-c", CHILD, *given], pass_fds=[prepared.fd], capture_output=True, check=True
    ).stdout


def test_a_started_process_reads_by_the_descriptor() -> None:
    with prepare(rows_of(300), Said([f"text {row}" * 50 for row in range(300)]), MAKER) as prepared:
        for row in (299, 0, 150):
            assert read_by_a_child(prepared, row) == prepared.body(row)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # 3.12's, of forks beside threads
def test_a_forked_process_reads_as_it_is() -> None:
    with prepare(rows_of(20), Said([f"text {row}" for row in range(20)]), MAKER) as prepared:
        wanted = [prepared.body(row) for row in range(20)]
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(write_end, b"\n".join(prepared.body(row) for row in range(20)))
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            assert pipe.read().split(b"\n") == wanted
        assert os.waitpid(pid, 0)[1] == 0


def test_nothing_is_left_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with prepare(rows_of(5), Said(["a"] * 5), MAKER) as prepared:
        assert list(tmp_path.iterdir()) == []
        fd = prepared.fd
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def test_a_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^TMPDIR: cannot hold the prepared bodies in .*nowhere"):
        prepare(rows_of(5), Said(["a"] * 5), MAKER)


def test_a_disk_that_fills_up_is_named_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if fd in (0, 1, 2):
            return write(fd, data)
        opened.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("llmtap.load.bodies.os.write", full)
    with pytest.raises(ConfigError, match=r"^TMPDIR: .*No space left"):
        prepare(rows_of(5), Said(["a"] * 5), MAKER)
    monkeypatch.undo()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(opened[0])


def test_a_short_write_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("llmtap.load.bodies.os.write", lambda fd, data: write(fd, bytes(data[:7])))
    with prepare(rows_of(9), Said([f"{row}" * 9 for row in range(9)]), MAKER) as prepared:
        bodies = [prepared.body(row) for row in range(9)]
    monkeypatch.undo()
    assert bodies == [MAKER.body(Prompt(text=f"{row}" * 9), row + 1) for row in range(9)]


def test_prompts_in_the_bodies_have_their_tokens() -> None:
    requests = rows_of(50, 123)
    with prepare(requests, RowPrompts(requests, TextCounter(OwnTokenizer()), seed=2), MAKER) as prepared:
        for row in range(50):
            text = prepared.body(row).split(b'"content":"')[1].split(b'"')[0].decode()
            assert count_tokens(text) == 123 == prepared.tokens[row]
