"""Exchanges for tests: plausible ones by hand, and any that could be by hypothesis."""

from array import array
from typing import Any

from hypothesis import strategies as st

from llmtap.exchange.exchange import (
    BLANK,
    OUTPUT,
    Added,
    CapturedText,
    EventLog,
    Exchange,
    RequestShape,
    Timeline,
    Tokens,
    Turn,
)
from llmtap.exchange.outcome import EventClass, Outcome, TokenSource, is_client_error

US = 1_000
MS = 1_000_000
WALL_NS = 1_700_000_000_000_000_000


def streamed(seq: int = 1, words: int = 3, *, at_ms: int = 0, gap_ms: float = 20, **told: Any) -> Exchange:
    """A streamed answer: submitted after 1 ms, first word after 100 ms, one every `gap_ms` from there on."""
    arrival = 5_000_000_000 + at_ms * MS
    log = EventLog()
    for i in range(words):
        t_ns = arrival + 100 * MS + round(i * gap_ms * MS)
        log.add(t_ns, EventClass.CONTENT, 180 + len(str(i)), 1, OUTPUT)
    end = (log.t_ns[-1] if words else arrival + 100 * MS) + MS
    log.add(end, EventClass.DONE, 12, -1, 0)
    first = log.t_ns[0] if words else None
    t = Timeline(
        arrival_ns=arrival,
        request_end_ns=arrival + 200 * US,
        submit_ns=arrival + MS,
        head_ns=arrival + 90 * MS,
        first_byte_ns=first,
        first_any_ns=first,
        first_token_ns=first,
        first_content_ns=first,
        last_token_ns=log.t_ns[words - 1] if words else None,
        response_end_ns=end,
        delivered_ns=end + 40 * US,
        events=log,
    )
    x = Exchange(
        relay="run.0.1",
        seq=seq,
        arrival_wall_ns=WALL_NS + at_ms * MS,
        timeline=t,
        method="POST",
        path="/v1/chat/completions",
        endpoint="chat.completions",
        dialect="openai.chat",
        model="tiny",
        response_model="tiny-2",
        tenant="acme",
        status=200,
        stream=True,
        finish_reason="stop",
        tokens=Tokens(100, words, None, None, TokenSource.USAGE),
        usage={"prompt_tokens": 100, "completion_tokens": words},
        added=Added(60 * US, 40 * US, 90 * US),
        uncertainty_ns=50 * US,
        clock="kernel",
        reads=words + 1,
        request_bytes=900,
        response_bytes=sum(log.sizes),
    )
    for name, value in told.items():
        setattr(x, name, value)
    return x


_ns = st.integers(-(10**6), 3 * 10**12)
_count = st.none() | st.integers(0, 10**7)
_text = st.text(max_size=12)
_word = st.text("abcdefgh-_.0123456789", min_size=1, max_size=12)
_ints = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda values: array("q", values))
_leaf = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e6, 1e6)
_numbers = st.dictionaries(_word, _leaf | st.dictionaries(_word, _leaf, max_size=2), max_size=3)


@st.composite
def _logs(draw: st.DrawFn, arrival_ns: int) -> EventLog:
    log = EventLog()
    t_ns = arrival_ns
    for _ in range(draw(st.integers(0, 6))):
        t_ns += draw(st.sampled_from((0, 1, 999, 1_000)) | st.integers(0, 10**9))
        log.add(
            t_ns,
            draw(st.sampled_from(EventClass)),
            draw(st.integers(0, 10**6)),
            draw(st.integers(-1, 9)),
            draw(st.sampled_from((0, BLANK, OUTPUT, BLANK | OUTPUT))),
        )
    return log


@st.composite
def any_exchange(draw: st.DrawFn) -> Exchange:
    """Whatever can be told of an exchange, in any combination."""
    arrival_ns = draw(st.integers(0, 10**15))

    def at() -> int | None:
        return draw(st.none() | _ns.map(lambda since: arrival_ns + abs(since)))

    t = Timeline(arrival_ns, *(at() for _ in range(13)), draw(_ns.map(abs)), draw(_logs(arrival_ns)))
    t.connected_ns, t.send_wait_ns = at(), draw(_ns.map(abs))
    if draw(st.booleans()):
        t.events.chars.extend(range(len(t.events)))
    x = Exchange(draw(_text), draw(st.integers(1, 2**40)), draw(st.integers(0, 2 * 10**18)), t)
    x.outcome = draw(st.sampled_from(Outcome))
    for name in ("endpoint", "dialect", "route", "arm", "unit", "excluded", "error", "no_token_reason"):
        setattr(x, name, draw(st.none() | _text))
    for name in ("model", "response_model", "trace_parent", "request_id", "finish_reason"):
        setattr(x, name, draw(st.none() | _word))
    x.method, x.tenant, x.clock = draw(_word), draw(_text), draw(_text)
    x.path = "/".join(draw(st.lists(st.sampled_from(("v1", "", "chat", "models")), max_size=4)))
    x.stream, x.uncertain = draw(st.booleans()), draw(st.booleans())
    x.status = draw(st.none() | st.integers(100, 599))
    if x.outcome is Outcome.UPSTREAM_ERROR and is_client_error(x.status):
        x.outcome = Outcome.CLIENT_ERROR  # a capture is read so: older ones had no such outcome
    for name in (
        "retries",
        "resent",
        "anchor",
        "reads",
        "request_bytes",
        "response_bytes",
        "unparsed_events",
    ):
        setattr(x, name, draw(st.integers(0, 2**31 - 1)))
    x.text_blocks = draw(st.none() | _ints)
    x.uncertainty_ns = draw(_ns.map(abs))
    x.slo_ttft_ns, x.slo_tpot_ns = draw(st.none() | _ns.map(abs)), draw(st.none() | _ns.map(abs))
    x.scheduled_ns = draw(st.none() | _ns.map(lambda since: arrival_ns + since))
    x.dispatch_late_ns = draw(st.none() | _ns)
    x.added = Added(*(draw(st.none() | _ns.map(abs)) for _ in range(3)))
    x.added.connect_ns = draw(st.none() | _ns.map(abs))
    x.tokens = Tokens(*(draw(_count) for _ in range(4)), draw(st.sampled_from(TokenSource)))
    x.usage, x.guardrail = draw(st.none() | _numbers), draw(st.none() | _numbers)
    x.server_timing = draw(st.none() | st.lists(_numbers, max_size=2))
    x.server_gaps_ns = draw(st.none() | st.lists(_ns.map(abs), max_size=3).map(lambda ns: array("q", ns)))
    if draw(st.booleans()):
        x.refusal = {
            "kind": draw(_word),
            "source": draw(_word),
            "detail": draw(_numbers),
            "confidence": "high",
        }
    if draw(st.booleans()):
        x.shape = draw(_asked())
    if draw(st.booleans()):
        source = draw(st.sampled_from(("explicit", "prefix")))
        by = draw(st.sampled_from((None, "human", "tool")))
        think_ns = draw(st.none() | _ns.map(abs))
        number = draw(st.integers(0, 99))
        x.turn = Turn(draw(_word), source, number, draw(st.none() | _text), think_ns, by)
    if draw(st.booleans()):
        x.text = CapturedText(draw(st.none() | _text), draw(st.none() | _text), draw(st.integers(0, 99)))
    return x


@st.composite
def _asked(draw: st.DrawFn) -> RequestShape:
    roles = draw(st.lists(st.sampled_from(("system", "user", "assistant", "tool")), max_size=3))
    a = RequestShape(
        draw(_count), draw(st.none() | st.floats(0, 2)), draw(st.none() | st.floats(0, 1)), roles=roles
    )
    a.n, a.tools, a.images = draw(st.none() | st.integers(0, 99)), draw(st.none() | st.integers(0, 99)), 3
    a.response_format = draw(st.none() | _word)
    a.sizes = array("q", [draw(st.integers(0, 10**6)) for _ in roles])
    a.tokens = draw(_count)
    if draw(st.booleans()):
        a.blocks, a.block_size, a.block_unit = draw(_ints), 2048, "bytes"
    return a
