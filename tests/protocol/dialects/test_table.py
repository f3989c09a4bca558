"""Invariant: a table reads what its paths name and nothing else, and one that is wrong names the key."""

import time
from typing import Any

import msgspec
import pytest

from llmtap.errors import ConfigError
from llmtap.protocol.delta import EventClass, TokenSource
from llmtap.protocol.dialects.chooser import DialectChooser
from llmtap.protocol.dialects.openai_chat import OpenAIChat
from llmtap.protocol.dialects.registry import TABLES, Dialects
from llmtap.protocol.dialects.table import reader as table_reader
from llmtap.protocol.dialects.table.declaration import (
    PATH_CHARS_MAX,
    PATHS_MAX,
    RULES_MAX,
    STEPS_MAX,
    DialectTable,
    Each,
    decode_table,
    parse_path,
)
from llmtap.protocol.dialects.table.notes import notes_on
from llmtap.protocol.dialects.table.reader import TableDialect, TableReader
from tests.protocol.dialects.events import encode, event, told


def raw(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "acme", "source": "invented", "end": "none", "rules": list(rules), **more}


def reader(*rules: dict[str, Any], **more: Any) -> TableReader:
    return TableDialect(decode_table(raw(*rules, **more)))()


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("a", ("a",)),
        ("a.b-c.$d", ("a", "b-c", "$d")),
        ("a[].b", ("a", Each(), "b")),
        ("[].a", (Each(), "a")),
        ("a[type=text].t", ("a", Each("type", True, "text"), "t")),
        ("a[x!=true][]", ("a", Each("x", False, True), Each())),
        (".", ()),
    ],
)
def test_a_path_has_steps(path: str, steps: tuple[Any, ...]) -> None:
    assert parse_path(path) == steps


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ({"name": "acme", "source": "s"}, "dialects.acme"),
        (raw({"contnt": "a"}), "dialects.acme.rules[0]"),
        (raw({"content": 3}), "dialects.acme.rules[0].content"),
        (raw({"content": "a"}, end="don"), "dialects.acme.end"),
        (raw({"content": "a"}, end="done"), "dialects.acme.end"),
        (raw({"content": "a"}, end="finish_reason"), "dialects.acme.end"),
        (raw(), "dialects.acme"),
        (raw({"content": "a"}, name="No Name"), "dialects.No Name.name"),
        (raw({"content": ""}), "dialects.acme.rules[0].content"),
        (raw({"content": "a..b"}), "dialects.acme.rules[0].content"),
        (raw({"content": "a["}), "dialects.acme.rules[0].content"),
        (raw({"content": "a" * (PATH_CHARS_MAX + 1)}), "dialects.acme.rules[0].content"),
        (raw({"content": ".".join("a" * (STEPS_MAX + 1))}), "dialects.acme.rules[0].content"),
        (raw({"has": "a[].b"}), "dialects.acme.rules[0].has"),
        (raw({"content": "a", "where": {"b[]": 1}}), "dialects.acme.rules[0].where"),
        (raw({"event": "a", "event_class": "dnoe"}), "dialects.acme.rules[0].event_class"),
        (raw({"content": "a"}, counts={"input": "i"}), "dialects.acme.counts"),
        (raw({"content": "a", "usage": "u"}, counts={"inptu": "i"}), "dialects.acme.counts"),
        (raw({"content": "a", "usage": "u"}, counts={"input": "i["}), "dialects.acme.counts.input"),
        (raw({"content": "a", "times": {"ttft": "t hours"}}), "dialects.acme.rules[0].times.ttft"),
        (raw({"content": "a", "times": {"soon": "t ms"}}), "dialects.acme.rules[0].times.soon"),
        (raw({"content": [f"a{i}" for i in range(PATHS_MAX + 1)]}), "dialects.acme"),
        (raw(*[{"event": "a", "content": "a"}] * (RULES_MAX + 1)), "dialects.acme"),
        (raw(*[{"content": "a"}] * 33), "dialects.acme"),
        (raw({"content": "a"}, events={"rol": "x"}), "dialects.acme.events"),
        (raw({"content": "a"}, finish_reasons={"x": "maybe"}), "dialects.acme.finish_reasons.x"),
    ],
)
def test_a_wrong_table_names_the_key(table: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_table(table)
    assert [error.place.partition("['")[0] for error in caught.value.all_errors()] == [place]


def test_an_unknown_key_gets_the_nearest_one_as_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        decode_table(raw({"contnt": "a"}))
    assert "content" in (caught.value.hint or "")


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        decode_table(raw({"content": "a[", "reasoning": "b["}, end="done"))
    assert len(list(caught.value.all_errors())) == 3


def test_a_table_in_code_is_checked_too_and_is_the_same_in_toml() -> None:
    with pytest.raises(ConfigError):
        DialectTable(name="a", source="s", end="done")
    for dialect in TABLES.values():
        again = decode_table(msgspec.to_builtins(dialect.table))
        assert again == dialect.table


TEXT = {"is": "content", "output": True, "content": True, "choices": (0,), "text": "Hi"}
CALL = {"is": "tool_call", "output": True, "tool_call": True, "choices": (0,)}
COUNTS = {"input": 3, "output": 4, "reasoning": None, "cached": None}


@pytest.mark.parametrize(
    ("rule", "value", "said"),
    [
        ({"content": "a.b"}, {"a": {"b": "Hi"}}, TEXT),
        ({"content": "a[].b"}, {"a": [{"b": "H"}, 3, {"b": "i"}]}, TEXT),
        ({"content": "a[].b"}, {"a": {"b": "Hi"}}, TEXT),
        ({"content": "a[t=x].b"}, {"a": [{"t": "x", "b": "Hi"}, {"t": "y", "b": "no"}]}, TEXT),
        ({"content": "a[t!=x].b"}, {"a": [{"t": "x", "b": "no"}, {"b": "Hi"}]}, TEXT),
        ({"content": ["a", "b"]}, {"a": "H", "b": "i"}, TEXT),
        ({"content": ["a[t=1].b", "a[t=true].b"]}, {"a": [{"t": 1, "b": "H"}, {"t": True, "b": "i"}]}, TEXT),
        (
            {"content": "a", "finish_reason": ["f", "g"]},
            {"a": "Hi", "g": "length", "f": "stop"},
            TEXT | {"finish_reason": "stop"},
        ),
        ({"content": "a"}, {"a": {"b": 1}}, {"is": "metadata"}),
        ({"content": "a", "where": {"k": "x*"}}, {"a": "Hi", "k": "xy"}, TEXT),
        ({"content": "a", "where": {"k": True}}, {"a": "Hi", "k": 1}, {"is": "metadata", "parsed": False}),
        ({"content": "a", "has": "k"}, {"a": "Hi", "k": None}, {"is": "metadata", "parsed": False}),
        (
            {"reasoning": "a", "content": "b"},
            {"a": "hm", "b": "Hi"},
            TEXT | {"also": ["reasoning"], "reasoning": True},
        ),
        ({"tool_call": "a"}, {"a": "{}"}, CALL | {"text": "{}"}),
        ({"tool_call": "a"}, {"a": {"x": 1}}, CALL),
        ({"call": "a"}, {"a": "tide"}, CALL),
        ({"payload": "a"}, {"a": "UklGRg=="}, {k: v for k, v in TEXT.items() if k != "text"}),
        ({"content": "a", "choice": "i"}, {"a": "Hi", "i": 2}, TEXT | {"choices": (2,)}),
        (
            {"content": "c[].t", "choice": "c[].i"},
            {"c": [{"t": "H", "i": 1}, {"t": "i", "i": 3}]},
            TEXT | {"choices": (1, 3)},
        ),
        ({"content": "c[].t", "choice": "c[].i"}, {"c": [{"t": "Hi", "i": 1 << 70}]}, TEXT),
        (
            {"content": "a", "tokens": "n"},
            {"a": "Hi", "n": 2},
            TEXT | {"tokens": 2, "token_source": TokenSource.TOKEN_IDS},
        ),
        (
            {"content": "a", "tokens": "n"},
            {"a": "Hi", "n": [5, 6, 7]},
            TEXT | {"tokens": 3, "token_source": TokenSource.TOKEN_IDS},
        ),
        (
            {"content": "a", "logprobs": "n"},
            {"a": "Hi", "n": [{}]},
            TEXT | {"tokens": 1, "token_source": TokenSource.LOGPROBS},
        ),
        ({"content": "a", "finish_reason": "f"}, {"a": "Hi", "f": "stop"}, TEXT | {"finish_reason": "stop"}),
        (
            {"content": "a", "done": {"d": True}},
            {"a": "Hi", "d": True},
            TEXT | {"also": ["done"], "done": True},
        ),
        ({"event_class": "done", "event": "e"}, {"type": "e"}, {"is": "done", "done": True}),
        ({"role": "r", "content": "a"}, {"r": "assistant", "a": ""}, {"is": "role"}),
        (
            {"error": "e"},
            {"e": {"type": "overloaded", "message": "m"}},
            {"is": "error", "error_type": "overloaded", "error_message": "m"},
        ),
        (
            {"content": "a"},
            {"a": "Hi", "error": "it broke"},
            {"is": "error", "error_type": "error", "error_message": "it broke"},
        ),
        ({"content": "a"}, {"a": "Hi", "model": "acme-1"}, TEXT | {"model": "acme-1"}),
        ({"event": "e", "call": "a"}, {"type": "e"}, {"is": "tool_call"}),
        ({"event": "e", "call": "a", "role": "r"}, {"type": "e", "r": "user"}, {"is": "role"}),
        (
            {"event": "e", "content": "a"},
            {"type": "error", "message": "it broke"},
            {"is": "error", "error_type": "error", "error_message": "it broke"},
        ),
    ],
)
def test_what_a_rule_reads(rule: dict[str, Any], value: Any, said: dict[str, Any]) -> None:
    assert told(reader(rule).read_event(event(value))) == said
    assert told(reader(rule).read_body(encode(value))) == said, "a whole body is read by the same rules"


def test_usage_finish_reasons_and_verdicts() -> None:
    table = raw(
        {
            "has": "u",
            "usage": "u",
            "finish_reason": "f",
            "verdicts": [{"path": "blocked.why", "kind": "input_guardrail"}],
        },
        counts={"input": "in", "output": ["out", "far.out"]},
        finish_reasons={"POLICY": "output_guardrail", "NO": "refusal", "BROKE": "failed", "safety": "stop"},
    )
    read = TableDialect(decode_table(table))
    said = told(read().read_event(event({"u": {"in": 3, "far": {"out": 4}}})))
    assert (said["is"], said["counts"]) == ("usage", COUNTS)
    for reason, of in (
        ("POLICY", ("guardrail", "output_guardrail")),
        ("NO", ("refusal", "model_refusal")),
        ("content_filter", ("guardrail", "output_guardrail")),
        ("safety", ("metadata", None)),
    ):
        delta = read().read_event(event({"u": {}, "f": reason}))
        kind = None if delta.verdict is None else delta.verdict.kind
        assert (delta.event_class.name.lower(), kind, delta.finish_reason) == (*of, reason)
    assert read().read_event(event({"u": {}, "f": "BROKE"})).error_type == "BROKE"
    delta = read().read_event(event({"u": {}, "blocked": {"why": "VIOLENCE"}}))
    assert delta.verdict is not None
    assert (delta.verdict.kind, delta.verdict.phase, delta.verdict.value) == (
        "input_guardrail",
        "input",
        "VIOLENCE",
    )


def test_counts_that_run_and_texts_that_repeat_the_text_so_far() -> None:
    running = reader({"content": "a", "running_tokens": "n"})
    assert [running.read_event(event({"a": "x", "n": n})).tokens for n in (1, 2, 5)] == [1, 1, 3]
    part = reader({"content": "a", "running_tokens": "n"}).read_event(event({"a": "", "n": 1}))
    assert (part.tokens, part.output, part.text) == (1, True, ""), "a token may end no character yet"
    cumulative = reader({"content": "a", "cumulative": True})
    texts = [cumulative.read_event(event({"a": text})).text for text in ("On", "Once", "Once upon")]
    assert texts == ["On", "ce", " upon"]


SIMILAR = (
    {"a": "Once ", "k": 1, "u": {"out": 1}, "x": 0},
    {"a": "upon ", "k": 1, "u": {"out": 2}, "x": 1},
    {"a": "a", "k": 1, "u": None},
    {"a": "", "k": 1, "u": {"out": 3}},
    {"a": "time", "k": True, "u": {"out": 4}},
    {"a": "there", "k": 1, "u": {"out": 5}, "f": "length"},
    {"a": "was ", "u": {"out": 6}},
    {"a": "more", "k": 1, "n": 2},
    {"a": "and ", "k": 1, "error": "it broke"},
    {"a": ["more"], "k": 1},
    {"a": "more", "k": 1, "u": {"out": 7}},
)


@pytest.mark.parametrize(
    "more", [{}, {"running_tokens": "u.out"}, {"tokens": "n"}, {"reasoning": "r[t=1].a"}]
)
def test_an_event_is_read_as_if_no_similar_one_came_before(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"content": "a", "finish_reason": "f", "usage": "u", "where": {"k": 1}, **more}
    rules = (rule, rule | {"where": {"k": True}, "content": "x", "refusal": "a"})
    table = decode_table(raw(*rules, counts={"output": "out"}, model="m"))
    inner = [{"r": [{"t": t, "a": text}], "k": 1} for t, text in ((1, "hm"), (1, "so"), (2, "no"), (1, "ha"))]
    compared = TableDialect(table)()
    deltas = [compared.read_event(event(value)) for value in (*SIMILAR, *inner)]
    monkeypatch.setattr(table_reader, "SAMPLES_MAX", 0)
    searched = TableDialect(table)()
    for delta, value in zip(deltas, (*SIMILAR, *inner), strict=True):
        other = searched.read_event(event(value))
        assert (told(delta), delta.repeatable) == (told(other), other.repeatable), value


def test_an_event_with_declared_tokens_is_not_known_again() -> None:
    read = reader({"content": "a", "tokens": "n"})
    assert read.read_event(event({"a": "Hi"})).repeatable
    assert not read.read_event(event({"a": "Hi", "n": 2})).repeatable
    assert {"a", "n"} <= read.names_read


def test_names_of_events_patterns_and_wrapped_events() -> None:
    named = reader({"event": "say.*", "content": "a"}, {"event": "say.loud", "reasoning": "a"}, match="kind")
    assert named.read_event(event({"kind": "say.loud", "a": "x"})).reasoning, "an exact name comes first"
    assert named.read_event(event({"a": "x"}, b"say.it")).content, "the event line names it"
    assert not named.read_event(event({"kind": "sing", "a": "x"})).parsed
    dialect = TableDialect(decode_table(raw({"event": "say", "content": "a"}, wrapped=True)))
    read = dialect()
    delta = read.read_event(event({"say": {"a": "x"}}))
    assert delta.content and delta.repeatable and "say" in read.names_read
    assert [dialect.claim(v, "/x") for v in ({"say": {"a": "x"}}, {"b": 1, "say": {"a": "x"}})] == [3, 2]


def test_an_event_in_an_envelope() -> None:
    dialect = TableDialect(decode_table(raw({"event": "say", "content": "a"}, envelope="result")))
    read, wrapped = dialect(), {"id": 1, "result": {"type": "say", "a": "Hi"}}
    assert [read.read_event(event(value)).text for value in (wrapped, wrapped["result"])] == ["Hi", "Hi"]
    assert dialect.claim(wrapped, "/x") == 3 and "result" in read.names_read
    assert read.read_event(event({"id": 1, "error": {"code": -32603, "message": "m"}})).error_type == "-32603"


def test_the_counts_of_usage_have_the_names_of_openai_unless_a_table_names_others() -> None:
    usage = {"input_tokens": 3, "completion_tokens": 4, "output_tokens_details": {"reasoning_tokens": 2}}
    said = told(reader({"usage": "u"}).read_event(event({"u": usage})))
    assert said["counts"] == COUNTS | {"reasoning": 2}
    said = told(reader({"usage": "u"}, counts={"output": "out"}).read_event(event({"u": usage | {"out": 7}})))
    assert (said["counts"]["input"], said["counts"]["output"]) == (3, 7)


def test_a_usage_without_a_known_count_is_noted() -> None:
    table = decode_table(raw({"usage": "u"}))
    notes = [notes_on(table, [event({"u": usage})]) for usage in ({"in": 3}, {"prompt_tokens": 3})]
    assert [[note.partition(":")[0] for note in found] for found in notes] == [["dialects.acme.counts"], []]


def test_data_that_is_no_object() -> None:
    plain = reader({"content": "a"}, plain_text="content")
    assert [plain.read_event(event(data)).text for data in (b"Hello", b'"Hi"')] == ["Hello", "Hi"]
    assert plain.read_event(event(b"[DONE]")).event_class is EventClass.DONE
    named = reader({"event": "output", "content": "."}, events={"metadata": "logs"}, plain_text="content")
    texts = [named.read_event(event(data, b"output")).text for data in (b"Hello", b'"Hi"', b"[DONE]")]
    assert texts == ["Hello", "Hi", ""]
    assert not named.read_event(event(b"Loading", b"logs")).output
    array = reader({"event": "messages", "content": "[type=ai].text"})
    assert array.read_event(event([{"type": "ai", "text": "x"}, {}], b"messages")).text == "x"


@pytest.mark.parametrize("reason", ["null", "None", "not_finished", "NOT_FINISHED", ""])
def test_an_answer_that_goes_on_has_no_finish_reason(reason: str) -> None:
    delta = reader({"content": "a", "finish_reason": "f"}).read_event(event({"a": "x", "f": reason}))
    assert (delta.finish_reason, delta.output) == (None, True)
    chunk = {"choices": [{"delta": {"content": "x"}, "finish_reason": reason}]}
    assert OpenAIChat().read_event(event(chunk)).finish_reason is None


@pytest.mark.parametrize("role", ["user", "USER", "ROLE_USER", "human", "system", "tool"])
def test_a_text_of_another_speaker_is_no_output(role: str) -> None:
    one = reader({"content": ["text", "parts[].text"], "usage": "usage"})
    for value in ({"role": role, "text": "Hi"}, {"parts": [{"author": {"role": role}, "text": "Hi"}]}):
        assert not one.read_event(event(value)).output
    both = one.read_event(event({"parts": [{"from": role, "text": "Hi"}, {"from": "bot", "text": "Ho"}]}))
    assert both.text == "Ho"
    assert one.read_event(event({"role": "model", "text": "Hi"})).output
    assert not one.read_event(event({"role": role, "text": "Hi"})).output


def test_a_message_has_the_speaker_that_its_first_event_names() -> None:
    one = reader({"event": "start", "role": "by"}, {"event": "piece", "content": "text"}, message="of")
    values = [
        {"type": "start", "of": 1, "by": "user"},
        {"type": "piece", "of": 1, "text": "Hi"},
        {"type": "start", "of": 2, "by": "assistant"},
        {"type": "piece", "of": 2, "text": "Hello"},
        {"type": "piece", "of": 2, "text": " you"},
        {"type": "piece", "of": 1, "text": " there"},
        {"type": "piece", "of": 3, "text": "!"},
    ]
    assert [one.read_event(event(value)).text for value in values] == ["", "", "", "Hello", " you", "", "!"]


def test_a_body_that_is_an_array() -> None:
    rule = {"content": "a", "usage": "u", "finish_reason": "f"}
    body = [{"a": "x", "u": {"out": 1}}, {"a": "y", "u": {"out": 3}, "f": "stop"}]
    counts = {"output": "out"}
    answers = told(reader(rule, counts=counts).read_body(encode(body)))
    assert (answers["text"], answers["choices"], answers["counts"]["output"]) == ("xy", (0, 1), 4)
    events = told(reader(rule, counts=counts, array="events").read_body(encode(body)))
    assert (events["text"], events["choices"], events["counts"]["output"]) == ("xy", (0,), 3)


OWN = raw(
    {"event": "message_start", "event_class": "role"},
    {"event": "content_block_delta", "content": "delta.text"},
    name="own.dialect",
)
BLOCK = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}}


def test_a_table_of_the_user_wins_over_a_dialect_that_reads_the_same() -> None:
    def chosen(*tables: dict[str, Any], path: str = "/v1/messages") -> str | None:
        chooser = DialectChooser(path, Dialects(map(decode_table, tables)))
        chooser.offer(event({"type": "message_start", "message": {}}), 10, 0)
        chooser.offer(event(BLOCK), 10, 0)
        return chooser.name

    assert chosen() == "anthropic"
    assert chosen(OWN) == "own.dialect"
    assert chosen(raw({"event": "other", "content": "a"})) == "anthropic"
    assert chosen(OWN | {"name": "anthropic"}) == "anthropic", "it replaces the one of this name"


def test_tables_cost_no_more_than_their_bounds_allow() -> None:
    rules = [
        {"has": f"x{i}", "content": [f"a[k=v].b{j}[].c[].d" for j in range(PATHS_MAX - 1)]} for i in range(32)
    ]
    read = reader(*rules)
    wide = {"b": {"c": [{"d": "t"}] * 2_000}, "k": "v"} | {
        f"b{j}": [{"c": [{"d": "x"}] * 100}] * 20 for j in range(PATHS_MAX)
    }
    data = encode({"x31": 1, "a": [wide] * 2})
    began = time.process_time()
    read.read_event(event(data))
    assert time.process_time() - began < 2.0, f"one event of {len(data):,} bytes"
    assert not reader({"content": "a[]"}).read_event(event({"a": ["x"] * 5_000})).parsed, "too many pieces"
    nested = reader({"has": "a", "call": "a[].b[].c"})
    few, many = ({"a": [{"b": [{}] * n}] * 100} for n in (300, 400))
    assert nested.read_event(event(few)).parsed
    assert not nested.read_event(event(many)).parsed, "too many elements of lists"


def test_events_that_repeat_what_deltas_brought_are_output_only_without_them() -> None:
    rules = ({"event": "delta", "content": "a"}, {"event": "whole", "content": "a", "repeats": True})
    whole = event({"type": "whole", "a": "Hi"})
    streamed = reader(*rules)
    assert streamed.read_event(event({"type": "delta", "a": "Hi"})).output
    assert told(streamed.read_event(whole)) == {"is": "metadata"}
    alone = reader(*rules)
    assert [alone.read_event(whole).output for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("path", "fits"),
    [
        ("/v1/ai/run/m/n", True),
        ("/v1/ai/run/", True),
        ("/v1/ai/ru", False),
        ("/x/generate", True),
        ("/x", False),
    ],
)
def test_paths_of_requests(path: str, fits: bool) -> None:
    dialect = TableDialect(decode_table(raw({"content": "a"}, paths=["/ai/run/*", "/generate"])))
    assert (dialect.claim({"error": "failure"}, path) > 0) is fits


def test_the_event_line_and_plain_text_claim_an_answer_too() -> None:
    table = decode_table(raw({"event": "output", "content": "a"}, plain_text="content"))
    claims = [TableDialect(table).claim(value, "/x", b"output") for value in ({"a": "x"}, None, [1])]
    assert claims[0] and claims[1]
    chooser = DialectChooser("/x", Dialects([table]))
    assert [released.delta.text for released in chooser.offer(event(b"Hello", b"output"), 5, 0)] == ["Hello"]


def test_a_rule_without_conditions_claims_only_what_it_reads() -> None:
    dialect = TableDialect(decode_table(raw({"content": "a.b"})))
    assert [dialect.claim(value, "/x") for value in ({"a": {"b": "Hi"}}, {"a": {}}, {"x": 1})] == [2, 0, 0]
