"""Bodies made before the run, so that nothing is made between two sends.

They lie one after another in a file without a name, identical ones once; two columns say where. Who sends
reads one with `os.pread`, which moves no shared position, so any number of processes may do so at once: they
inherit the descriptor `fd` (a fork does; `pass_fds=[fd]` for a started program) and are told the columns.
The pages stay in the kernel's cache, and leave it when memory is short.
"""

import os
import tempfile
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import IO, Final, Protocol, Self

from llmtap.errors import ConfigError
from llmtap.workload.prompts.fitted_prompts import FittedSource
from llmtap.workload.prompts.fitting import Fitted, in_batches
from llmtap.workload.prompts.prompt import Prompt, PromptSource
from llmtap.workload.requests import Requests

__all__ = ["Maker", "Prepared", "PromptLengths", "prepare"]

WRITE_BYTES: Final = 1 << 20
KNOWN_MAX: Final = 1 << 18
"""Distinct bodies that are remembered, in some 40 MB; beyond them identical ones are written again."""


class Maker(Protocol):
    """Makes bodies."""

    def body(self, prompt: Prompt, output: int) -> bytes:
        """Of a request for `output` tokens."""
        ...

    def captured(self, body: bytes) -> bytes:
        """Of a row that has one of its own."""
        ...


@dataclass(slots=True)
class PromptLengths:
    """How long the prompts are that were fitted, against what they were to be. Tokens."""

    n: int = 0
    exact: int = 0
    missed_min: int = 0
    """The most that one is too short, as a negative number."""
    missed_max: int = 0
    ways: dict[str, int] = field(default_factory=dict)
    """Prompts by how they were counted."""

    def add(self, fitted: Fitted) -> None:
        self.n += 1
        self.exact += fitted.exact
        self.missed_min = min(self.missed_min, fitted.missed)
        self.missed_max = max(self.missed_max, fitted.missed)
        self.ways[fitted.way] = self.ways.get(fitted.way, 0) + 1

    def describe(self) -> dict[str, object]:
        return {
            "n": self.n, "exact": self.exact, "missed_min": self.missed_min, "missed_max": self.missed_max,
            "ways": dict(self.ways),
        }  # fmt: skip


class Prepared:
    """Bodies by row. Close it when nobody reads any more."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.begins, self.ends = array("q"), array("q")
        """Of each row, where its body begins and ends in the file."""
        self.tokens = array("q")
        """Of each row, the prompt's tokens as they were counted; -1 where nobody did."""
        self.lengths = PromptLengths()

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def fd(self) -> int:
        """The file's descriptor, for who inherits it."""
        return self._file.fileno()

    @property
    def bytes_total(self) -> int:
        """Bytes of all rows' bodies: what will be sent."""
        return sum(self.ends) - sum(self.begins)

    @property
    def bytes_stored(self) -> int:
        """Bytes in the file."""
        return os.fstat(self.fd).st_size

    def body(self, row: int) -> bytes:
        begin = self.begins[row]
        return os.pread(self.fd, self.ends[row] - begin, begin)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def prepare(
    requests: Requests,
    prompts: PromptSource | None,
    maker: Maker,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """The bodies of all rows: the row's own where the trace has it, else made of its prompt.

    Args:
        prompts: None where every row has a body of its own.
        progress: is told how many of how many are done.

    Raises:
        ConfigError: where there is no room for them (`TMPDIR`), or the endpoint cannot take a prompt.
    """
    try:
        # Without a name from its first moment, so that nothing is left behind however we end.
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    except OSError as exc:
        raise _no_room(exc) from None
    prepared = Prepared(file)
    writer = _Writer(prepared)
    count = len(requests)
    try:
        for batch in in_batches(range(count), requests.input or array("q", bytes(8 * count))):
            for row, body, tokens in _bodies(requests, prompts, maker, batch, prepared.lengths):
                assert row == len(prepared)
                writer.add(body)
                prepared.tokens.append(tokens)
            if progress is not None:
                progress(len(prepared), count)
        writer.flush()
    except OSError as exc:
        prepared.close()
        raise _no_room(exc) from None
    except BaseException:
        prepared.close()
        raise
    return prepared


def _bodies(
    requests: Requests,
    prompts: PromptSource | None,
    maker: Maker,
    rows: list[int],
    lengths: PromptLengths,
) -> Iterable[tuple[int, bytes, int]]:
    """Row, body and counted tokens, in the order of the rows."""
    own = {row: requests.bodies[row] for row in rows if requests.bodies and requests.bodies[row]}
    missing = [row for row in rows if row not in own]
    made: dict[int, tuple[Prompt, int]] = {}
    if missing:
        if prompts is None:
            raise ConfigError("the workload", f"row {missing[0]} has neither a body nor a prompt")
        if isinstance(prompts, FittedSource):
            for row, (prompt, fitted) in zip(missing, prompts.prompts(missing), strict=True):
                made[row] = (prompt, fitted.tokens)
                lengths.add(fitted)
        else:
            made = {row: (prompts.prompt(row), -1) for row in missing}
    for row in rows:
        if row in own:
            yield row, maker.captured(own[row]), -1
        else:
            prompt, tokens = made[row]
            yield row, maker.body(prompt, requests.output[row]), tokens


class _Writer:
    """Puts bodies behind one another, each once."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._pending = bytearray()
        self._at = 0
        """Where in the file the next body will begin."""
        self._known: dict[bytes, int] = {}

    def add(self, body: bytes) -> None:
        # 16 bytes of a digest: two bodies that differ in a run of a billion share one by a chance of 1e-21.
        digest = blake2b(body, digest_size=16).digest()
        begin = self._known.get(digest)
        if begin is None:
            begin = self._at
            self._at += len(body)
            self._pending += body
            if len(self._known) < KNOWN_MAX:
                self._known[digest] = begin
            if len(self._pending) >= WRITE_BYTES:
                self.flush()
        self._prepared.begins.append(begin)
        self._prepared.ends.append(begin + len(body))

    def flush(self) -> None:
        left = memoryview(self._pending)
        while left:
            left = left[os.write(self._prepared.fd, left) :]
        left.release()
        self._pending = bytearray()


def _no_room(exc: OSError) -> ConfigError:
    return ConfigError(
        "TMPDIR", f"cannot hold the prepared bodies in {tempfile.gettempdir()}: {exc.strerror or exc}",
        "set it to a folder with more room, or ask for fewer requests",
    )  # fmt: skip
