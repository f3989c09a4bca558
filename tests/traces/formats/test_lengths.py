"""Formats of times and lengths: exact values survive, shared traces have their known statistics."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.registry import format_named
from tests.support.storage import capture_rows
from tests.support.workloads.trace_files import from_trace, read, rows, stats, trace, write

AZURE, BURST, MOONCAKE, GUIDELLM, PERF = map(
    format_named, ("azure", "burstgpt", "mooncake", "guidellm", "inference-perf")
)
LENGTHS = ("arrival_ns", "input_tokens", "output_tokens")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
V1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
V3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"

# ---------------------------------------------------------------- real traces

FILES = [
    ("azure", "azure_llm_2023/AzureLLMInferenceTrace_conv.rows_1_12000.csv.gz"),
    ("azure", "azure_llm_2023/AzureLLMInferenceTrace_code.rows_1_6000.csv.gz"),
    ("mooncake", "mooncake/conversation_trace.rows_1_8000.jsonl.gz"),
    ("mooncake", "mooncake/synthetic_trace.rows_1_2500.jsonl.gz"),
    ("burstgpt", "burstgpt/BurstGPT_1.rows_1_280.csv"),
    ("burstgpt", "burstgpt/BurstGPT_3.rows_1_280.csv"),
    ("burstgpt", "burstgpt_like_synth/synth_seed42_n100000.csv.gz"),
]


@pytest.mark.parametrize(("name", "file"), FILES)
def test_a_shared_trace_has_its_statistics_and_its_values_survive(name: str, file: str) -> None:
    fmt, data, held = format_named(name), trace(file), stats(file)
    assert fmt.sniff(data[:65_536], "trace")
    source, batches = read(fmt, data)
    times, read_, made, sessions, models = (
        [value for (value,) in rows(batches, column)]
        for column in ("arrival_ns", "input_tokens", "output_tokens", "session", "model")
    )
    for lengths, known in ((read_, held["input_tokens"]), (made, held["output_tokens"])):
        found = {"n": len(lengths), "sum": sum(lengths), "min": min(lengths), "max": max(lengths)}
        assert known.items() >= found.items()
    if "arrivals" in held:
        assert held["arrivals"]["span_s"] == pytest.approx((max(times) - min(times)) / 1e9, rel=1e-11)
    assert {model: models.count(model) for model in held.get("models", {})} == held.get("models", {})
    if "sessions" in held:
        assert held["sessions"]["sessions"] == len(set(sessions) - {None})
    if "prefix" in held:
        blocks = {block for (ids,) in rows(batches, "blocks") for block in ids}
        assert held["prefix"]["blocks_unique"] == len(blocks)
    again, written = write(fmt, source.info, batches)
    assert (written.dropped, written.notes) == ({}, [])
    names = (*LENGTHS, "blocks", "session", "response_end_us", "model", "route", "outcome")
    assert rows(read(fmt, again)[1], *names) == rows(batches, *names)
    if name in ("azure", "mooncake"):  # of which the common spelling is ours
        assert again == data


def test_a_mooncake_trace_becomes_seconds_for_other_tools() -> None:
    data = trace("mooncake/synthetic_trace.rows_1_2500.jsonl.gz")
    source, batches = read(MOONCAKE, data)
    seconds, written = write(GUIDELLM, source.info, batches)
    assert seconds.splitlines()[2].startswith(b'{"timestamp": 0.04, "input_length": 23769, ')
    assert (written.rows, written.notes) == (2_500, [])
    assert GUIDELLM.sniff(seconds[:65_536], "x.jsonl")
    assert not MOONCAKE.sniff(seconds[:65_536], "x.jsonl")
    back = read(GUIDELLM, seconds)
    assert write(MOONCAKE, back[0].info, back[1])[0] == data


# ---------------------------------------------------------------- what is read

MOON = b'{"timestamp": %s, "input_length": 1, "output_length": 1%s}\n'
DATA: list[tuple[str, str, tuple[str, ...], list[tuple[Any, ...]], list[str]]] = [
    (
        "azure",
        (
            "GeneratedTokens,Extra,ContextTokens,TIMESTAMP\n"
            "4,x,3,2023-11-16 18:15:46.6805901\n\n6,y,5,2023-11-16 19:15:46.5+01:00\n"
            '"7",z,8,2023-11-16T18:15:46Z\n'
        ),
        LENGTHS,
        [
            (1_700_158_546_680_590_100, 3, 4),
            (1_700_158_546_500_000_000, 5, 6),
            (1_700_158_546_000_000_000, 8, 7),
        ],
        ["columns that are not kept: Extra"],
    ),
    ("azure", f"\ufeff{HEADER}\r\n1969-12-31 23:59:59.999999999,1,2", LENGTHS, [(-1, 1, 2)], []),
    (
        "burstgpt",
        f"{V3}\n19440110.0,s1,43,GPT-4,906,446,1352,Conversation log\n19440111.25,,0,ChatGPT,7,0,7,API log\n",
        (*LENGTHS, "session", "response_end_us", "model", "outcome", "route"),
        [
            (19_440_110 * 10**9, 906, 446, "s1", 43_000_000, "GPT-4", "complete", "Conversation log"),
            (19_440_111_250_000_000, 7, 0, None, 0, "ChatGPT", "upstream_error", "API log"),
        ],
        ["1 rows have no response tokens: failed requests"],
    ),
    (
        "burstgpt",
        f'{V1}\n5,"a,""b""",472,18,491,API log\r\n6,GPT-4,1,,1,API log\n7,a,1,2,,x\n',
        (*LENGTHS, "model"),
        [(5 * 10**9, 472, 18, 'a,"b"'), (6 * 10**9, 1, 0, "GPT-4"), (7 * 10**9, 1, 2, "a")],
        [
            "1 rows have no response tokens: failed requests",
            "2 rows have another total than the sum: it is not kept",
        ],
    ),
    (
        "mooncake",
        (
            '\ufeff{"timestamp": 0.25, "input_length": 513, "output_length": 1, "hash_ids": [1]}\r\n\n'
            '{"output_length":2,"input_length":1,"timestamp":7,"level":3}'
        ),
        (*LENGTHS, "blocks", "block_size"),
        [(250_000, 513, 1, [1], 512), (7_000_000, 1, 2, None, None)],
        [
            "1 rows with a field 'level' that is not kept",
            "1 times have fractions of a millisecond; `--from guidellm` reads seconds",
            "1 rows have no hash_ids",
            "1 rows have another number of hash_ids than blocks of 512 tokens",
        ],
    ),
    (
        "guidellm",
        '{"timestamp": 1.5, "input_length": 3, "output_length": 4, "duration": 0.25}\n',
        (*LENGTHS, "response_end_us"),
        [(1_500_000_000, 3, 4, 250_000)],
        ["1 rows have no hash_ids"],
    ),
]


@pytest.mark.parametrize(("name", "data", "names", "expected", "notes"), DATA)
def test_values_are_exact_and_survive(
    name: str, data: str, names: tuple[str, ...], expected: list[tuple[Any, ...]], notes: list[str]
) -> None:
    fmt = format_named(name)
    source, batches = read(fmt, data.encode())
    assert rows(batches, *names) == expected
    assert source.notes == notes
    if expected and fmt.write_rows and "999999999" not in data:  # of which Azure's writer keeps seven digits
        assert rows(read(fmt, write(fmt, source.info, batches)[0])[1], *names) == expected


ERRORS: list[tuple[str, str | bytes, str]] = [
    ("azure", f"{HEADER}\n\n2023-11-16 18:15:46,1,\n", "line 3: GeneratedTokens: expected a whole number"),
    ("azure", f"{HEADER}\n9999-02-03 18:15:46,1,1\n", "line 2: TIMESTAMP: expected a date"),
    ("burstgpt", f"{V1}\n-5,GPT-4,1,2,3,API log\n", "line 2: Timestamp: expected seconds"),
    ("burstgpt", f"{V1}\n9999999999,GPT-4,1,2,3,API log\n", "line 2: Timestamp: expected seconds"),
    ("mooncake", MOON % (b"1", b"") + MOON % (b"-1", b""), "line 2: timestamp: expected 0 or more, got"),
    ("mooncake", MOON % (b"10000000000000", b""), "line 1: timestamp: expected a finite number"),
    ("mooncake", MOON % (b"1", b', "hash_ids": [-9223372036854775809]'), "line 1: hash_ids[0]: "),
    (
        "mooncake",
        MOON.replace(b": 1,", b": 1.5,") % (b"1", b""),
        "line 1: input_length: expected int, got float",
    ),
    ("mooncake", MOON.replace(b": 1,", b": -1.0,") % (b"1", b""), "line 1: input_length: expected int >= 0"),
    (
        "mooncake",
        MOON.replace(b": 1,", b": true,") % (b"1", b""),
        "line 1: input_length: expected int, got bool",
    ),
    ("burstgpt", f"{V1}\n5,GPT-4,1.5,2,3,API log\n", "line 2: Request tokens: expected a whole number"),
    ("guidellm", MOON % (b"1", b', "duration": -1'), "line 1: duration: expected 0 or more, got"),
]


@pytest.mark.parametrize(("name", "data", "result"), ERRORS)
def test_an_error_names_line_and_field(name: str, data: str | bytes, result: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(format_named(name), data if isinstance(data, bytes) else data.encode())
    assert str(caught.value).startswith(result)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("spelling", ["{}", "{}.0", "{}.00", "{}e0", '"{}"'])
@pytest.mark.parametrize(
    ("times", "mooncake", "guidellm"),
    [
        (("0", "1500", "3000"), True, False),
        (("0", "0", "0"), True, False),
        (("27482",), True, False),
        (("0", "1", "2"), True, True),
        (("1753780607", "1753780907"), True, True),
        (("1753780607550", "1753780907550"), True, False),
    ],
)
def test_the_spelling_of_times_tells_nothing(
    times: tuple[str, ...], mooncake: bool, guidellm: bool, spelling: str
) -> None:
    for row in range(len(times)):
        spelled = [spelling.format(t) if i == row else t for i, t in enumerate(times)]
        head = b"".join(MOON % (t.encode(), b"") for t in spelled)
        assert (MOONCAKE.sniff(head, ""), GUIDELLM.sniff(head, "")) == (mooncake, guidellm)
        with_blocks = head.replace(b"}", b', "hash_ids": [1]}')
        assert (MOONCAKE.sniff(with_blocks, ""), GUIDELLM.sniff(with_blocks, "")) == (mooncake, guidellm)
        arrivals = rows(read(MOONCAKE, head)[1], "arrival_ns")
        assert arrivals == [(int(t) * 1_000_000,) for t in times]


@pytest.mark.parametrize(
    ("times", "mooncake", "guidellm"),
    [
        (("0.5", "1500.25", "3000"), True, True),
        (("1.5",), True, True),
        (("0.04", "0.08", "0.31"), False, True),
    ],
)
def test_fractions_tell_seconds_only_of_times_close_together(
    times: tuple[str, ...], mooncake: bool, guidellm: bool
) -> None:
    head = b"".join(MOON % (t.encode(), b"") for t in times)
    assert (MOONCAKE.sniff(head, ""), GUIDELLM.sniff(head, "")) == (mooncake, guidellm)


@pytest.mark.parametrize("time", ["null", "[]", '"soon"', "1" + "0" * 400])
def test_a_time_that_is_no_number_is_named_by_the_reader(time: str) -> None:
    head = MOON % (time.encode(), b"")
    assert MOONCAKE.sniff(head, "") and MOONCAKE.sniff(head * 2, "")
    with pytest.raises(FormatError, match="line 1: timestamp: "):
        read(MOONCAKE, head)


@pytest.mark.parametrize("count", ["472", "472.0", "4.72e2"])
def test_a_count_is_a_whole_number_however_it_is_spelled(count: str) -> None:
    line = MOON.replace(b'"input_length": 1', b'"input_length": %s') % (b"0", count.encode(), b"")
    for fmt in (MOONCAKE, GUIDELLM, format_named("aiperf")):
        assert rows(read(fmt, line)[1], "input_tokens") == [(472,)]
    if "e" not in count:
        table = f"{V1}\n5,m,{count},18.0,490,API log\n"
        assert rows(read(BURST, table.encode())[1], "input_tokens", "output_tokens") == [(472, 18)]
        table = f"{HEADER}\n2023-11-16 18:15:46,{count},1.\n"
        assert rows(read(AZURE, table.encode())[1], "input_tokens", "output_tokens") == [(472, 1)]


@pytest.mark.parametrize("zone", ["", "Z", "+00:00", "+0000", "+00"])
def test_a_zone_has_any_usual_form(zone: str) -> None:
    table = f"{HEADER}\n2023-11-16 18:15:46.5{zone},1,1\n2023-11-16 19:15:46.5+0100,1,1\n"
    assert rows(read(AZURE, table.encode())[1], "arrival_ns") == [(1_700_158_546_500_000_000,)] * 2


@pytest.mark.parametrize(
    ("line", "mooncake", "guidellm"),
    [
        (MOON % (b"1", b', "hash_ids": [1]'), True, False),
        (MOON % (b"1", b', "duration": 3'), False, True),
        (MOON % (b"1", b', "session_id": "a"'), False, False),
        (b"timestamp,input_length,output_length\n", False, False),
    ],
)
def test_fields_tell_the_format(line: bytes, mooncake: bool, guidellm: bool) -> None:
    head = line + line[:20]
    assert (MOONCAKE.sniff(head, ""), GUIDELLM.sniff(head, "")) == (mooncake, guidellm)


# ---------------------------------------------------------------- what is written


def test_a_capture_becomes_azure_in_time_order_and_its_exactness_is_told() -> None:
    ns = 1_700_158_546_680_590_099
    batch = batch_of(
        3, {"arrival_ns": [ns + 10**9, ns, ns], "input_tokens": [1, 2, 3], "output_tokens": [4, 5, None]}
    )
    for fmt, end, digits in ((AZURE, "\r\n", "6805900"), (PERF, "\n", "680590")):
        data, written = write(fmt, CaptureInfo(arrivals="wall"), [batch])
        lines = (HEADER, f"2023-11-16 18:15:46.{digits},2,5", f"2023-11-16 18:15:47.{digits},1,4", "")
        assert data.decode() == end.join(lines)
        assert written.dropped == {"no count of output tokens": 1}
        assert written.notes == [f"2 arrivals lost what is finer than {len(digits)} digits of a second"]
    info, undated = from_trace("x", {"arrival_ns": [1], "input_tokens": [1], "output_tokens": [2]})
    data, written = write(AZURE, info, [undated])
    assert data.decode().splitlines()[1] == "1970-01-01 00:00:00.0000000,1,2"
    assert written.notes[0] == "arrivals have no date: written as if the trace began with 1970"


def test_a_capture_becomes_burstgpt() -> None:
    batch = batch_of(
        3,
        {
            "arrival_ns": [2_500_000_000, 1_000_000_000, 3_000_000_000],
            "input_tokens": [5, 7, None],
            "output_tokens": [6, None, None],
            "session": ["s,1", None, None],
            "response_end_us": [1_500_000, 7, None],
            "outcome": ["complete", "upstream_reset", "complete"],
            "route": ["a", "b", "c"],
            "model": ["GPT-4", None, None],
        },
    )
    data, written = write(BURST, CaptureInfo(arrivals="wall"), [batch])
    assert data.decode().splitlines() == [
        V3,
        "0.0,,0.000007,,7,0,7,API log",
        '1.5,"s,1",1.5,GPT-4,5,6,11,Conversation log',
    ]
    assert written.dropped == {"no count of input tokens": 1}
    assert written.notes == ["arrivals count from the smallest one, 1970-01-01T00:00:01.000000000Z"]


def test_a_capture_becomes_mooncake_and_counts_from_its_smallest_arrival() -> None:
    day = 1_700_158_546_680_590_000
    batches = [
        batch_of(2, {"arrival_ns": [day + 5_900_000, None], "input_tokens": [1, 1], "output_tokens": [1, 1]}),
        batch_of(
            2,
            {
                "arrival_ns": [day, day + 2_900_000],
                "input_tokens": [2, 3],
                "output_tokens": [1, None],
                "outcome": ["complete", "upstream_error"],
            },
        ),
    ]
    data, written = write(MOONCAKE, CaptureInfo(arrivals="wall", level="shape"), batches)
    assert data.splitlines() == [
        b'{"timestamp": 0, "input_length": 2, "output_length": 1}',
        b'{"timestamp": 5, "input_length": 1, "output_length": 1}',
    ]
    assert written.dropped == {"no arrival time": 1, "failed request": 1}
    assert written.rows == 2
    assert written.notes[0] == "arrivals count from the smallest one, 2023-11-16T18:15:46.680590000Z"
    assert written.notes[-1] == "1 arrivals lost what is finer than the format's digits"


def test_a_capture_keeps_its_sharing_under_small_numbers() -> None:
    batches = [capture_rows.batch(300, 7), capture_rows.batch(300, 8, start=301)]
    hashes = dict(rows(batches, "id", "blocks"))
    ordered = sorted(rows(batches, "arrival_ns", "id"))
    info = CaptureInfo(arrivals="wall", block_unit="tokens", block_size=512)
    data, written = write(MOONCAKE, info, batches)
    numbers = [ids for (ids,) in rows(read(MOONCAKE, data)[1], "blocks")]
    there = [hashes[name] for _, name in ordered if hashes[name] is not None][: len(numbers)]
    assert written.rows == len(numbers) == len(there)
    flat = [i for ids in numbers for i in ids]
    assert list(dict.fromkeys(flat)) == list(range(len(set(flat))))
    pairs = {(h, n) for hs, ns in zip(there, numbers, strict=True) for h, n in zip(hs, ns, strict=True)}
    assert len(pairs) == len({h for h, _ in pairs}) == len({n for _, n in pairs})


def test_blocks_of_other_sizes_are_told() -> None:
    info, batch = from_trace(
        "x",
        {
            "arrival_ns": [0, 1, 2],
            "input_tokens": [1024, 40, 600],
            "output_tokens": [1, 1, 1],
            "blocks": [list(range(64)), [64, 65, 66], [1, 2]],
            "block_size": [16, 16, 2048],
            "block_unit": ["tokens", "tokens", "bytes"],
        },
    )
    data, written = write(GUIDELLM, info, [batch])
    assert rows(read(GUIDELLM, data)[1], "blocks") == [([31, 63],), ([66],), ([1, 2],)]
    assert written.changed["prefix blocks"].startswith("2 rows had smaller blocks: ")


# ---------------------------------------------------------------- any rows

COUNT = st.integers(0, 10**17)
NS = st.integers(0, 9 * 10**18)
TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=("Cs",)), min_size=1
)
BLOCKS = st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)
ANY: list[tuple[str, dict[str, st.SearchStrategy[Any]]]] = [
    ("azure", {"arrival_ns": st.integers(-(9 * 10**16), 9 * 10**16).map(lambda t: t * 100)}),
    ("mooncake", {"arrival_ns": NS, "blocks": BLOCKS}),
    ("guidellm", {"arrival_ns": NS, "blocks": BLOCKS, "response_end_us": st.none() | st.integers(0, 10**14)}),
    (
        "burstgpt",
        {
            "arrival_ns": NS,
            "session": st.none() | TEXT,
            "model": st.none() | TEXT,
            "response_end_us": st.none() | st.integers(0, 10**15),
            "route": st.none() | TEXT,
        },
    ),
]


@pytest.mark.parametrize(("name", "kinds"), ANY)
@given(st.data())
def test_whatever_it_can_hold_survives(
    name: str, kinds: dict[str, st.SearchStrategy[Any]], data: st.DataObject
) -> None:
    kinds = kinds | {"input_tokens": COUNT, "output_tokens": COUNT}
    table = data.draw(st.lists(st.tuples(*kinds.values()), max_size=15))
    batch = batch_of(len(table), {column: [row[i] for row in table] for i, column in enumerate(kinds)})
    info = CaptureInfo(source=name, arrivals="wall" if name == "azure" else "trace", blocks="trace")
    written, _ = write(format_named(name), info, [batch])
    assert rows(read(format_named(name), written)[1], *kinds) == rows([batch], *kinds)
