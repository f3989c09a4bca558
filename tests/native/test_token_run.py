"""The compiled path of the meter against its Python twins.

Invariant: both recognise the same reads as token events, and make the same exchanges of the same frames,
however these are cut into batches.

Long because both implementations are compared by the same cases.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from llmtap import native
from llmtap.channel.frames import BatchReader, FrameKind, Hello, PythonFrameBatch, pack_batch
from llmtap.exchange.answer import AnswerReader
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.native import REASON
from llmtap.protocol.delta import Delta, EventClass
from llmtap.protocol.repetition import (
    BLOCK_BYTES_MAX,
    ROOM,
    LooseValue,
    PythonTokenRun,
    Repetition,
    TokenRun,
)
from tests.support.traffic.corpus import NAMES, Recorded
from tests.support.traffic.tap_frames import MS, Script

compiled = native.compiled
pytestmark = pytest.mark.skipif(compiled is None, reason=f"the compiled path does not run: {REASON}")

DELTA = Delta(EventClass.CONTENT, output=True, content=True, text="", choices=(0,), repeatable=True)
HELLO = Hello(relay="r", pid=7, clock="kernel", anchor_mono_ns=0, anchor_wall_ns=1_700_000_000_000_000_000)
NATIVE_ROOM = 256
PASSED_MAX = 256
Row = tuple[int, int, int, int, bytes]


def repetition(before: bytes = b'data: {"text":"', behind: bytes = b'"}\n\n') -> Repetition:
    return Repetition(before, behind, DELTA, behind + b"\r\n")


def loosened() -> Repetition:
    """A string and a number ahead of the text, a string beyond it."""
    return Repetition(
        b'data: {"id":"',
        b'"}\n\n',
        DELTA,
        b'"}\n\n\r\n',
        names=frozenset({"id", "n", "pad"}),
        ahead=(LooseValue(b'","n":', True), LooseValue(b',"text":"', False)),
        beyond=(LooseValue(b'","pad":"', True),),
    )


def twins(known: Repetition, *, chunked: bool = False, keeps_texts: bool = True) -> list[TokenRun]:
    assert compiled is not None
    return [
        PythonTokenRun(known, chunked=chunked, keeps_texts=keeps_texts),
        compiled.TokenRun(known.fixed, chunked, keeps_texts),
    ]


def added(known: Repetition, read: bytes, *, chunked: bool = False) -> bool:
    """Whether a read is recognised, which both implementations agree on, as on what they take from it."""
    for keeps_texts in (True, False):
        python, other = twins(known, chunked=chunked, keeps_texts=keeps_texts)
        found = python.add(read, 5, 7)
        assert other.add(read, 5, 7) == found, read
        assert len(python) == len(other) == found
        if found:
            assert other.take() == python.take(), read
            assert len(python) == len(other) == 0
    return found


# ---------------------------------------------------------------- one read


def strings() -> Iterator[bytes]:
    """Insides of strings, right and wrong ones."""
    for c in range(256):
        yield bytes([c])
        yield b"\\%c" % c
        yield b"a%cb" % c
        for second in (0x00, 0x22, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF):
            for rest in (b"", b"\x80", b"\x7f", b"\x80\x80", b"\x80\xc0", b"\x80\x80\x80", b"\xbf\xbf"):
                yield bytes([c, second]) + rest
    units = (0x0000, 0x0020, 0x0085, 0x3000, 0xD7FF, 0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0xE000, 0xFFFF)
    for first in units:
        for spelt in (b"\\u%04x", b"\\u%04X", b"\\U%04x", b"\\u%03x", b"\\u %03x", b"\\u+%03x"):
            yield spelt % first
        for second in units:
            yield b"\\u%04x\\u%04x" % (first, second)
            for broken in (b"\\u%04x\\u%03x", b"\\u%04x\\x%04x", b"\\u%04x %04x", b"\\u%04xu%04x"):
                yield broken % (first, second)
    yield from (b"", b"\\", b"a\\", b'a"', b'"', b'a" ', b'","x":"', b"\\u", b"\\u12", b"\\u123", b"\\u123g")
    yield from (
        b"\xc3\\n\xa9",
        b"\xc3\\u00a9",
        b" \n",
        b" \\n\\t\\r\\f ",
        b"\\b",
        b"\\u00a0 ",
        "\u2003".encode(),
    )


def test_the_same_strings_are_texts() -> None:
    known, n = repetition(), 0
    for text in strings():
        n += added(known, known.opening + text + known.closing)
    assert n > 1_000


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 255, 256, 257, 4_080, 4_095, 4_096, 4_097, 65_536])
def test_the_same_sizes_of_blocks_are_recognised(size: int) -> None:
    known = repetition(b'"', b'"}')
    block = b'"%b"}' % (b"x" * (size - 3)) if size > 2 else b"x" * size
    assert added(known, block) == (4 <= size <= BLOCK_BYTES_MAX)
    for line in (b"%x", b"%X", b"0%x", b"%x;a", b" %x", b"%d"):
        chunk = line % size + b"\r\n" + block + b"\r\n"
        assert added(known, chunk, chunked=True) <= (4 <= size <= BLOCK_BYTES_MAX)
        for at in (len(chunk) - 1, len(chunk) - 2):
            added(known, chunk[:at] + b"\n" + chunk[at + 1 :], chunked=True)


@pytest.mark.parametrize(
    ("count", "total", "is_known"),
    [
        ("1", "8", True),
        ("99999992", "99999999", True),
        ("3", "11", False),
        ("0", "7", False),
        ("03", "10", False),
        ("-1", "6", False),
        ("99999999", "100000006", False),
        ("9" * 30, "9" * 30, False),
        ("", "7", False),
    ],
)
def test_the_same_running_counts_are_taken(count: str, total: str, *, is_known: bool) -> None:
    tokens, total_tokens = LooseValue(b',"total":', False, 0), LooseValue(b'},"text":"', False, 7)
    ahead = Repetition(b'data: {"usage":{"n":', b'"}\n\n', DELTA, b'"}\n\n\r\n', ahead=(tokens, total_tokens))
    read = b'data: {"usage":{"n":%b,"total":%b},"text":"a"}\n\n' % (count.encode(), total.encode())
    assert added(ahead, read) == is_known
    # The numbers after the text are read from the last to the first.
    values = LooseValue(b',"total":', False, 7), LooseValue(b'","usage":{"n":', False, 0)
    beyond = Repetition(b'data: {"text":"', b"}}\n\n", DELTA, b"}}\n\n\r\n", beyond=values)
    read = b'data: {"text":"a","usage":{"n":%b,"total":%b}}\n\n' % (count.encode(), total.encode())
    assert added(beyond, read) == is_known
    if is_known:
        for run in twins(beyond):
            assert run.add(read, 5, 7)
            assert list(run.take()[5]) == [int(count)]


def test_a_run_has_room_for_a_bounded_number_of_events() -> None:
    assert compiled is not None
    known = repetition()
    read = known.opening + b"a" + known.closing
    for keeps_texts, room in ((True, ROOM), (False, NATIVE_ROOM)):
        run = compiled.TokenRun(known.fixed, False, keeps_texts)
        for i in range(room):
            assert not run.full
            assert run.add(read, i, -i)
        assert run.full
        times, added_ns, sizes, blanks, texts, counts = run.take()
        assert not counts
        assert (list(times), list(added_ns)) == (list(range(room)), [-i for i in range(room)])
        assert (list(sizes), blanks, len(texts)) == ([len(read)] * room, bytes(room), room * keeps_texts)
        for empty in (run, PythonTokenRun(known, chunked=False, keeps_texts=keeps_texts)):
            with pytest.raises(ValueError, match="expected"):
                empty.take()
    while run.add(read, 1, 1):
        pass
    assert len(run) == NATIVE_ROOM, "one that is not taken refuses more"


@pytest.mark.parametrize(
    ("text", "events"), [("x" * 1_000, 6), ("\U0001f600" + "x" * 1_000, 2), ("x" * 4_000, 2)]
)
def test_a_run_is_full_when_its_texts_take_much_memory(text: str, events: int) -> None:
    known = repetition()
    read = known.opening + text.encode() + known.closing
    for keeps_texts in (True, False):
        for run in twins(known, keeps_texts=keeps_texts):
            for i in range(10):
                assert run.full == (keeps_texts and i >= events)
                assert run.add(read, 1, 1)
            assert len(run.take()[4]) == 10 * keeps_texts
            assert not run.full


def test_a_run_refuses_what_is_no_shape() -> None:
    assert compiled is not None
    loose = (LooseValue(b",", True),) * 4
    for fixed in (
        (b"a", loose, (), b"b"),
        (b"a", (), loose, b"b"),
        ("a", (), (), b"b"),
        (b"a", (), (), None),
        (b"a",),
        (b"a", ((b",", True),), (), b"b"),
        (b"a", (("x", True, None),), (), b"b"),
        (b"a", ((b"x", False, "1"),), (), b"b"),
    ):
        with pytest.raises((TypeError, ValueError, IndexError)):
            compiled.TokenRun(fixed, False, True)


# ---------------------------------------------------------------- frames to exchanges


class Collector:
    """A sink that remembers the exchanges and the failures."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.exchanges: list[Exchange] = []
        self.failures: list[str] = []

    def observe(
        self, relay: str, seq: int, arrival_ns: int, arrival_wall_ns: int, head: bytes, clock: str
    ) -> Observer:
        return Observer(relay, seq, arrival_ns, arrival_wall_ns, head, clock, **self._options)

    def on_open(self) -> None: ...
    def on_discard(self, n: int = 1) -> None: ...
    def on_assignment(self, arm: Any) -> None: ...
    def on_status(self, relay: str, status: Any) -> None: ...

    def on_end(self, x: Exchange) -> None:
        self.exchanges.append(x)

    def on_error(self, kind: str, error: BaseException | str) -> None:
        self.failures.append(kind)


def packed(rows: Sequence[Row], ends: Sequence[int]) -> Iterator[bytes]:
    """The frames in batches that end before these."""
    for number, (a, b) in enumerate(zip([0, *ends], [*ends, len(rows)], strict=True), 1):
        yield pack_batch(number, [value for row in rows[a:b] for value in row])


def assembled(
    monkeypatch: pytest.MonkeyPatch, implementation: Any, rows: Sequence[Row], ends: Sequence[int], **how: Any
) -> tuple[list[Exchange], list[str], int]:
    """The exchanges of these frames, the failures, and the number of frames that were recognised."""
    monkeypatch.setattr(native, "compiled", implementation)
    sink = Collector(**how)
    assembler, reader = Assembler(HELLO, sink), BatchReader()
    digested = 0

    def counted(frames: Iterator[Row]) -> Iterator[Row]:
        nonlocal digested
        for frame in frames:
            digested += 1
            yield frame

    for batch in packed(rows, ends):
        for _, frames in reader.feed(batch):
            assembler.digest(counted(assembler.unrecognised(frames)))
    assembler.lose()
    return sink.exchanges, sink.failures, len(rows) - digested


def compare(
    monkeypatch: pytest.MonkeyPatch, rows: Sequence[Row], ends: Sequence[int] = (), **how: Any
) -> int:
    """The number of frames that only the compiled code saw."""
    expected = assembled(monkeypatch, None, rows, ends, **how)
    found = assembled(monkeypatch, compiled, rows, ends, **how)
    assert found[:2] == expected[:2]
    assert expected[2] == 0
    return found[2]


def cut(rng: random.Random, rows: Sequence[Row]) -> list[int]:
    return sorted(rng.choices(range(len(rows) + 1), k=rng.randrange(8)))


def merged(rng: random.Random, exchanges: list[list[Row]]) -> list[Row]:
    """Frames of several exchanges in any order that keeps the order of each."""
    waiting = [list(reversed(rows)) for rows in exchanges]
    out = []
    while waiting := [rows for rows in waiting if rows]:
        rows = rng.choice(waiting)
        out += [rows.pop() for _ in range(min(len(rows), rng.choice((1, 1, 3, 40))))]
    return out


def request(seq: int, path: str = "/v1/chat/completions") -> list[Row]:
    body = b'{"model":"m","stream":true,"messages":[]}'
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return [(FrameKind.SENT, seq, 1_000 * seq, 1_000 * seq + 50, head + body)]


def answered(
    seq: int,
    reads: Sequence[bytes],
    *,
    chunked: bool,
    path: str = "/v1/chat/completions",
    fields: bytes = b"",
) -> list[Row]:
    framing = b"Transfer-Encoding: chunked\r\n" if chunked else b""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%b%b\r\n" % (framing, fields)
    rows = [*request(seq, path), (FrameKind.RESPONSE_HEAD, seq, MS, 1, head)]
    if chunked:
        reads = [*(b"%x\r\n%b\r\n" % (len(read), read) for read in reads if read), b"0\r\n\r\n"]
    rows += [(FrameKind.RESPONSE_DATA, seq, (i + 2) * MS, 10 * i % 37, r) for i, r in enumerate(reads)]
    end_ns = (len(reads) + 2) * MS
    closing = msgspec.json.encode({"outcome": "complete"})
    return [
        *rows,
        (FrameKind.RESPONSE_END, seq, end_ns, 0, b""),
        (FrameKind.CLOSE, seq, end_ns, 0, closing),
    ]


@pytest.mark.parametrize("chunked", [False, True])
def test_recorded_answers_are_the_same_exchanges(monkeypatch: pytest.MonkeyPatch, *, chunked: bool) -> None:
    rng = random.Random(6)
    exchanges = []
    for seq, name in enumerate(NAMES, 1):
        recorded = Recorded(name)
        blocks = recorded.decoded.replace(b"\n\n", b"\n\n\0").split(b"\0") * 3  # an event in each read
        path = recorded.doc["request"]["path"]
        kind = {k.lower(): v for k, v in recorded.doc["response"]["headers"]}.get("content-type", "")
        fields = f"Content-Type: {kind}\r\n".encode()
        exchanges.append(answered(seq, blocks, chunked=chunked, path=path, fields=fields))
    rows = merged(rng, exchanges)
    for ends in ((), cut(rng, rows), range(1, len(rows), 7)):
        assert compare(monkeypatch, rows, ends) > 100


TEXTS = (
    "a",
    " tok",
    "\n",
    " ",
    "\u3000",
    "ünï",
    "日本",
    "😀",
    '"',
    "\\",
    "I can't help with that",
    "x" * 200,
    "x" * 4_100,
)
SPELLINGS: tuple[Callable[[Any], bytes], ...] = (
    lambda value: json.dumps(value, separators=(",", ":")).encode(),
    lambda value: json.dumps(value).encode(),
    lambda value: json.dumps(value, ensure_ascii=False).encode(),
)


def chat(delta: dict[str, Any], **top: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **top}


HOSTILE: tuple[Callable[[bytes], bytes], ...] = (
    lambda e: e.replace(b'"content"', b'"content":"x","content"'),
    lambda e: e.replace(b"data: ", b"data:"),
    lambda e: e.replace(b"data: ", b"data:  "),
    lambda e: e.replace(b"\n\n", b"\r\n\r\n"),
    lambda e: e.replace(b"\n\n", b"\r\r"),
    lambda e: e.replace(b"\n\n", b"\n"),
    lambda e: b": comment\n" + e,
    lambda e: b"event: x\n" + e,
    lambda e: b"\xef\xbb\xbf" + e,
    lambda e: e + e,
    lambda e: b"\n" + e,
    lambda e: e.replace(b'"choices"', b'\ndata: "choices"'),
    lambda e: e.replace(b'"index":0', b'"index":1').replace(b'"index": 0', b'"index": 1'),
    lambda e: e.replace(b'"m"', b'"other"'),
    lambda e: e.replace(b'{"content"', b'{ "content"'),
    lambda e: e.replace(b"null", b'"stop"'),
    lambda e: e.replace(b'"content"', b'"role":"assistant","content"'),
    lambda e: e.replace(b'"content"', b'"refusal"'),
    lambda e: e.replace(b'"content"', b'"c\\u006fntent"'),
    lambda e: e[:-1],
    lambda e: e[:20],
    lambda e: e.replace(b"}", b'}\xff"', 1),
    lambda e: e.replace(b'":"', b'":"\\ud800', 3),
    lambda e: e.replace(b'"choices"', b'"usage":{"completion_tokens":3,"prompt_tokens":1},"choices"'),
    lambda e: b"data: [DONE]\n\n",
    lambda e: b"",
)


def stream(rng: random.Random) -> list[bytes]:
    """Reads of a stream that is mostly token events of a shape that changes now and then."""
    reads = [b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n']
    while len(reads) < 30 or rng.random() < 0.8:
        spell, member = rng.choice(SPELLINGS), rng.choice(("content", "content", "reasoning_content"))
        kind = rng.randrange(4)
        for n in range(rng.choice((1, 8, 8, 90, 600))):
            top = [{}, {"seq": n}, {"created": n // 9, "pad": "x" * (n % 9)}, {"id": f"c-{n}"}][kind]
            event = b"data: %b\n\n" % spell(chat({member: rng.choice(TEXTS[:-2])}, **top))
            reads.append(event)
            if rng.random() < 0.02:
                reads.append(rng.choice(HOSTILE)(event))
        reads.append(b"data: %b\n\n" % spell(chat({member: rng.choice(TEXTS)})))
    for _ in range(rng.randrange(4)):  # some events come in two reads
        i = rng.randrange(len(reads))
        at = rng.randrange(len(reads[i]) + 1)
        reads[i : i + 1] = [reads[i][:at], reads[i][at:]]
    return reads


@pytest.mark.parametrize("seed", range(8))
def test_generated_streams_are_the_same_exchanges(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    exchanges = [answered(seq, stream(rng), chunked=rng.random() < 0.7) for seq in range(1, 6)]
    for _ in range(rng.randrange(3)):  # a token event in a frame of another kind, and frames out of place
        rows = rng.choice(exchanges)
        i = rng.randrange(7, len(rows))
        kind = rng.choice(
            (FrameKind.REQUEST_DATA, FrameKind.TUNNEL_DOWN, FrameKind.INTERIM, FrameKind.STATUS)
        )
        rows.insert(i, (int(kind), *rows[i][1:]))
        kind = rng.choice(
            (FrameKind.RESPONSE_HEAD, FrameKind.UPGRADED, FrameKind.DROP, FrameKind.RESPONSE_END)
        )
        rows.insert(rng.randrange(len(rows)), (int(kind), rows[0][1], 5 * MS, 3, b"HTTP/1.1 200 OK\r\n\r\n"))
    rows = merged(rng, exchanges)
    how: dict[str, Any] = {"count_tokens": len} if seed % 3 == 1 else {}
    assert compare(monkeypatch, rows, cut(rng, rows), **how) > 100


def words(n: int, text: str = "word", seq: int = 1) -> list[Row]:
    script = Script().request(seq).head(seq, 100)
    for i in range(n):
        script.word(seq, 101 + i, text)
    return script.end(seq, 200 + n, n).close(seq, 201 + n).frames()


def test_most_events_of_a_stream_never_become_python_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two of 3,000 show what repeats; the event that fills a run, of 64 and then of 256, is a frame, too.
    fed = Counter[bool]()

    def feed(reader: AnswerReader, payload: bytes, t_ns: int = 0) -> list[Delta]:
        fed[native.compiled is None] += 1
        return read(reader, payload, t_ns)

    read = AnswerReader.feed
    monkeypatch.setattr(AnswerReader, "feed", feed)
    assert 2_970 < compare(monkeypatch, words(3_000)) < 3_000
    assert fed[True] == fed[False] < 8, "those that become frames are not parsed either"


def test_a_batch_whose_lengths_are_wrong_reads_no_byte_beyond_it() -> None:
    assert compiled is not None
    rows = words(3)
    batch = bytearray(next(packed(rows, ())))
    n, at = len(rows), 20 + 25 * len(rows)
    for length in (0, 1, 1_000, 2**31, 2**32 - 1):
        for i in (0, n - 1):
            wrong = bytearray(batch)
            wrong[at + 4 * i : at + 4 * i + 4] = length.to_bytes(4, "little")
            assert list(compiled.FrameBatch(bytes(wrong), n)) == list(PythonFrameBatch(bytes(wrong), n))
    for wrong_n in (-1, n * 100, 2**62):
        with pytest.raises(ValueError, match="frames in"):
            compiled.FrameBatch(bytes(batch), wrong_n)
    for short in (b"", b"x" * 19):
        with pytest.raises(ValueError, match="frames in"):
            compiled.FrameBatch(short, 0)


def test_an_observer_that_is_another_object_is_left_to_python() -> None:
    assert compiled is not None
    rows = words(5)
    batch = next(packed(rows, ()))
    run = PythonTokenRun(repetition(), chunked=False, keeps_texts=False)
    for observer in (type("Observer", (), {"token_run": None})(), type("Observer", (), {"token_run": run})()):
        assert list(compiled.FrameBatch(batch, len(rows)).unrecognised({1: observer})) == rows
    with pytest.raises(AttributeError):
        list(compiled.FrameBatch(batch, len(rows)).unrecognised({1: object()}))
