"""FORMAT.md and the code say the same; its recipes run, and find what is in the capture."""

import re
from array import array
from pathlib import Path
from typing import Any

import pytest

import llmtap.capture
from llmtap.capture.columns import COLUMNS, Coarse, columns_at
from llmtap.capture.schema import EVENT_CLASS_NAMES, VERSION, CaptureInfo
from llmtap.capture.store.rows import to_batch
from llmtap.exchange.exchange import BACK, CapturedText, Exchange, PairMember, RequestShape, Tokens, Turn
from llmtap.exchange.outcome import Outcome, TokenSource
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import measure
from llmtap.metrics.summary import Summary
from tests.support.expected import check_expected
from tests.support.storage.captures import ledger, write_capture
from tests.support.traffic.exchanges import US, streamed

PAGE = Path(llmtap.capture.__file__).parent / "FORMAT.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"\| `(\w+)` \| [a-z0-9 ]+(?:UTC)? \| (?:none|shape|full) \| (.*?)\|([^|]*)\|")
MEANINGS = {m[1]: (m[2].strip(), m[3].strip()) for m in map(ROW.fullmatch, TEXT.splitlines()) if m}


def with_columns(text: str) -> str:
    """The page with the declared columns: their meanings stay, and that of a new one is empty."""
    lines, waiting = [], list(COLUMNS)
    for line in text.splitlines(keepends=True):
        m = ROW.match(line)
        if m is None:
            lines.append(line)
        while m is not None and waiting and (m[1] == waiting[0].name or waiting[0].name not in MEANINGS):
            column = waiting.pop(0)
            meaning, null = MEANINGS.get(column.name, ("", ""))
            lines.append(f"| `{column.name}` | {column.type} | {column.level} | {meaning} | {null} |\n")
    return "".join(lines)


def section(title: str) -> str:
    """What stands under a heading."""
    return re.split(r"^##+ ", TEXT.split(f" {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_columns_are_those_that_are_declared(pytestconfig: pytest.Config) -> None:
    check_expected(PAGE, with_columns(TEXT), pytestconfig)
    assert list(MEANINGS) == [column.name for column in COLUMNS]
    assert all(meaning and null for meaning, null in MEANINGS.values())
    assert f"version {VERSION} of the schema" in TEXT


def test_each_word_of_a_closed_set_is_told() -> None:
    for name, words in (
        ("outcome", list(Outcome)),
        ("event_class", EVENT_CLASS_NAMES),
        ("token_source", [source for source in TokenSource if source is not TokenSource.NONE]),
    ):
        assert set(re.findall(r"`(\w+)`", MEANINGS[name][0])) >= set(map(str, words)), name


def test_each_key_of_the_metadata_is_told() -> None:
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section("Files"), re.MULTILINE))))
    assert told == set(CaptureInfo.__struct_fields__)


def test_every_recipe_is_tried(capture: list[Exchange]) -> None:
    assert len(re.findall(r"^```\w+ run$", TEXT, re.MULTILINE)) == 7 + 1 + 2
    assert query("Conversations (DuckDB)") == [(2, 2.5, 3, 1)]
    # 1 and 2 are shared by all, and the third block of the first two exchanges is one of them.
    assert query("Maximum hits of a prefix cache (DuckDB)") == [("c1", "bytes", 2_048, 15, 10)]


def full_exchange() -> Exchange:
    """Of which everything is known that a row can tell."""
    x = streamed(
        2,
        arm="a",
        route="r",
        unit="u",
        excluded="e",
        request_id="q",
        upstream_request_id="up-q",
        trace_parent="t",
    )
    t = x.timeline
    for name in ("first_reasoning_ns", "first_tool_call_ns", "first_refusal_ns"):
        setattr(t, name, t.submit_ns)
    x.scheduled_ns, x.dispatch_late_ns, x.slo_ttft_ns, x.slo_tpot_ns = t.arrival_ns, US, US, US
    x.added.connect_ns, t.connected_ns = US, t.submit_ns
    x.server_gaps_ns, x.error, x.no_token_reason = array("q", [US]), "e", "empty"
    x.refusal = {"kind": "k", "source": "s", "detail": {}, "confidence": "high"}
    x.guardrail, x.server_timing = {"phase": "input"}, [{"name": "queue", "ms": 1.5}]
    x.service_tier = x.service_tier_requested = "flex"
    x.label = "should-refuse"
    x.tokens.reasoning = x.tokens.cached = 1
    x.shape = RequestShape(
        9, 0.5, 0.5, 1, 1, 1, "text", ["user"], array("q", [7]), array("q", [1]), 2_048, "bytes", 3
    )
    x.turn = Turn("s", "explicit", 1, "p", US, "tool")
    x.text = CapturedText("asked", "answered", 1)
    t.events.chars.extend([4] * len(t.events))
    x.text_blocks = array("q", [1])
    x.side, x.pair = BACK, PairMember("r-1")
    return x


@pytest.mark.parametrize("level", ["none", "coarse", "shape", "full"])
def test_each_level_keeps_the_columns_that_are_told(level: str) -> None:
    (row,) = to_batch([full_exchange()], capture="c1", level=level)[0].to_pylist()
    kept = {name for name, value in row.items() if value is not None}
    assert kept == columns_at(level)
    left_out = {column.name for column in COLUMNS if column.coarse is Coarse.NULL}
    assert all(f"`{name}`" in section("The level `coarse`") for name in left_out)


# ---------------------------------------------------------------- recipes


def exchanges() -> list[Exchange]:
    """Two tenants; conversations of 1 to 3 turns; numbers 4 and 5 are missing."""
    out = []
    for i in (1, 2, 3, 6, 7):
        x = streamed(i, words=i + 1, at_ms=10 * i, gap_ms=10 + i, tenant="acme" if i % 2 else "globex")
        first = x.timeline.arrival_ns + (90 + 7 * i) * 1_000_000
        x.timeline.first_content_ns = first
        x.shape = RequestShape(blocks=array("q", [1, 2, i]), block_size=2_048, block_unit="bytes")
        x.turn = Turn("ab"[i > 3], "prefix", 0, by="tool" if i == 6 else "human")
        out.append(x)
    return out


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    xs = exchanges()
    write_capture(tmp_path / "capture" / "llmtap-1.parquet", xs[:3], ledger=ledger(3))
    write_capture(tmp_path / "capture" / "llmtap-2.parquet", xs[3:], ledger=ledger(7))
    monkeypatch.chdir(tmp_path)
    return xs


def recipes(language: str, title: str) -> list[str]:
    found = re.findall(rf"```{language} run\n(.*?)```", section(title), re.DOTALL)
    assert found, title
    return found


def query(title: str) -> list[tuple[Any, ...]]:
    duckdb = pytest.importorskip("duckdb")
    (sql,) = recipes("sql", title)
    with duckdb.connect() as connection:
        rows: list[tuple[Any, ...]] = connection.execute(sql).fetchall()
    return rows


def ttfts_ns(xs: list[Exchange], tenant: str) -> list[int]:
    return [ns for x in xs if x.tenant == tenant and (ns := measure(x).ttft_ns) is not None]


def test_latencies_by_tenant(capture: list[Exchange]) -> None:
    rows = query("Latencies by tenant (DuckDB)")
    assert [row[0] for row in rows] == ["acme", "globex"]
    for tenant, n, ttft_ms, e2e_ms in rows:
        ours = Histogram(ttfts_ns(capture, tenant))
        assert n == ours.n
        expected = [ns / 1e6 for ns in ours.percentiles((0.5, 0.9, 0.99)) if ns is not None]
        assert ttft_ms == pytest.approx(expected, rel=0.002)
        ends = Histogram(ns for x in capture if x.tenant == tenant and (ns := measure(x).e2e_ns) is not None)
        assert e2e_ms == pytest.approx((ends.percentile(0.5) or 0) / 1e6, rel=0.002)


def test_gaps_between_chunks(capture: list[Exchange]) -> None:
    for tenant, n, tbc_ms, pause_ms in query("Gaps between chunks (DuckDB)"):
        gaps = sorted(gap for x in capture if x.tenant == tenant for gap in measure(x).tbc_ns)
        assert (n, pause_ms) == (len(gaps), pytest.approx(gaps[-1] / 1e6))
        assert tbc_ms == pytest.approx(
            [(Histogram(gaps).percentile(p) or 0) / 1e6 for p in (0.5, 0.99)], 0.002
        )


def told_by(x: Exchange, tokens: list[int], total: int | None, source: TokenSource, **more: Any) -> Exchange:
    """The same stream with other word of its tokens; the log's last event is no output."""
    x.timeline.events.tokens[:] = array(x.timeline.events.tokens.typecode, [*tokens, -1])
    x.tokens = Tokens(100, total, more.get("reasoning"), None, source)
    return x


NOBODY = [-1, -1, -1]
CUTS = [
    # What the events and the server say of three chunks; tokens of each, where that tells.
    ([1, 1, 1], 3, TokenSource.USAGE, None, True),
    (NOBODY, 3, TokenSource.USAGE, None, True),  # an ordinary OpenAI stream
    (NOBODY, 9, TokenSource.USAGE, 6, True),  # reasoning that was not sent
    (NOBODY, 7, TokenSource.USAGE, None, False),
    (NOBODY, 3, TokenSource.CHUNKS, None, False),
    (NOBODY, None, TokenSource.NONE, None, False),
    ([2, 5, 1], 8, TokenSource.TOKEN_IDS, None, True),
    ([0, 4, 1], 5, TokenSource.RUNNING_USAGE, None, True),
    ([2, -1, 1], 8, TokenSource.TOKEN_IDS, None, False),
]


def test_chunks_have_the_tokens_that_the_report_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cuts in (*([cut] for cut in CUTS), CUTS):
        summary, xs = Summary(), []
        for i, (tokens, total, source, reasoning, _) in enumerate(cuts):
            xs.append(told_by(streamed(i + 1), tokens, total, source, reasoning=reasoning))
            summary.add(xs[-1])
        write_capture(tmp_path / "capture" / "llmtap-1.parquet", xs)
        told: Any = summary.to_dict({}, 1.0)["chunking"]
        assert query("Tokens per chunk (DuckDB)") == [
            (
                told["events"],
                told["events_per_read"],
                pytest.approx(told["tokens_per_chunk_mean"]),
                pytest.approx(told["single_token_share"]),
                sum(not known for *_, known in cuts),
            )
        ]


def test_beside_traces_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    xs = [
        streamed(1, trace_parent=parent),
        streamed(2),
        streamed(3, request_id="req-3", at_ms=5),
    ]
    write_capture(tmp_path / "capture" / "llmtap-1.parquet", xs)
    monkeypatch.chdir(tmp_path)
    rows = query("Join with traces and logs (DuckDB)")
    assert [row[:4] for row in rows] == [
        ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", None, "run.0.1-1"),
        (None, None, "req-3", "run.0.1-3"),
    ]
    assert [row[5] for row in rows] == [99.0, 99.0]


def test_missing_numbers(capture: list[Exchange]) -> None:
    assert query("Missing numbers (DuckDB)") == [("run.0.1", 4, 5)]
    assert llmtap.read("capture").integrity().captures[0].relays[0].ranges == [(4, 5)]


def test_polars(capture: list[Exchange]) -> None:
    pytest.importorskip("polars")
    (code,) = recipes("python", "Polars")
    names: dict[str, Any] = {}
    exec(code, names)
    for row in names["result"].iter_rows(named=True):
        ours = Histogram(ttfts_ns(capture, row["tenant"]))
        assert (row["n"], row["ttft_p50_ms"]) == (
            ours.n,
            pytest.approx((ours.percentile(0.5) or 0) / 1e6, rel=0.002),
        )


def test_llmtap_and_pyarrow(capture: list[Exchange]) -> None:
    whole, early = streamed(8, stream=False), streamed(9)  # neither has a TTFT
    early.timeline.submit_ns = early.timeline.response_end_ns
    write_capture(Path("capture") / "llmtap-3.parquet", [whole, early])
    capture = [*capture, whole, early]
    reading, dataset = recipes("python", "llmtap and pyarrow")
    names: dict[str, Any] = {}
    exec(reading, names)
    ours = Histogram(ns for x in capture[:-2] if (ns := measure(x).ttft_ns) is not None)
    assert names["table"].num_rows == ours.n == len(capture) - 2
    assert names["result"][0] == pytest.approx((ours.percentile(0.5) or 0) / 1e3, rel=0.002)
    assert names["slowest"].seq == 7
    exec(dataset, names)
    assert names["result"] == len([x for x in capture if x.tenant == "acme"])
    assert names["info"]["capture"] == "c1"
