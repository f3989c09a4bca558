"""What ShareGPT can hold, conversations of text turns, survives write and read, wherever the rows lie."""

import io
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.capture.schema import CaptureInfo
from llmtap.traces.format import FormatError, batch_of
from llmtap.traces.formats.sharegpt import FORMAT

read, write = FORMAT.read, FORMAT.write

Turns = list[dict[str, str]]


def turns(*message: tuple[str, str]) -> Turns:
    return [{"from": speaker, "value": value} for speaker, value in message]


TALK = turns(("system", "be brief"), ("human", "hi"), ("gpt", "hello"), ("human", "why?"), ("gpt", "because"))


def rows_of(data: bytes | str) -> tuple[list[dict[str, Any]], list[str]]:
    source = read(io.BytesIO(data.encode() if isinstance(data, str) else data))
    rows = [row for batch in source.batches for row in batch.to_pylist()]
    assert source.info.level == "full"
    return rows, source.notes


def written(rows: list[dict[str, Any]], size: int = 3) -> tuple[Any, Any]:
    names = sorted({name for row in rows for name in row})
    batches = [
        batch_of(len(part), {name: [row.get(name) for row in part] for name in names})
        for part in (rows[i : i + size] for i in range(0, len(rows), size))
    ]
    out = io.BytesIO()
    result = write(out, CaptureInfo(), batches)
    return json.loads(out.getvalue()), result


def again(rows: list[dict[str, Any]]) -> Any:
    names = ("session", "turn", "request_body", "response_text")
    return written([{name: row[name] for name in names} for row in rows])[0]


def test_each_answer_is_a_row_whose_request_has_what_was_said_before() -> None:
    rows, notes = rows_of(json.dumps([{"id": "a_0", "conversations": TALK}]))
    assert notes == []
    assert [(r["session"], r["turn"], r["response_text"]) for r in rows] == [
        ("a_0", 0, "hello"),
        ("a_0", 1, "because"),
    ]
    assert json.loads(rows[0]["request_body"]) == {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    }
    message = json.loads(rows[1]["request_body"])["messages"]
    assert [m["role"] for m in message] == ["system", "user", "assistant", "user"] == rows[1]["message_roles"]
    assert rows[1]["message_bytes"] == [8, 2, 5, 4]
    assert (rows[1]["prompt_bytes"], rows[1]["turn_by"]) == (19, "human")
    assert rows[1]["arrival_ns"] is rows[1]["input_tokens"] is None


@pytest.mark.parametrize(
    ("message", "answers", "note"),
    [
        (turns(("gpt", "hello"), ("human", "hi"), ("gpt", "yes")), ["yes"], "1 answers follow no question"),
        (turns(("human", "hi"), ("gpt", "a"), ("human", "so?")), ["a"], "1 turns have no answer"),
        (turns(("human", "hi"), ("human", "you"), ("gpt", "a")), ["a"], None),
        ([], [], "1 conversations have no answer"),
        (turns(("user", "hi"), ("chatgpt", "a")), ["a"], None),
        (turns(("human", "hi"), ("Oracle", "hm"), ("gpt", "a")), ["a"], "1 turns are by a speaker"),
    ],
)
def test_odd_conversations_are_read_as_far_as_they_go(
    message: Any, answers: list[str], note: str | None
) -> None:
    rows, notes = rows_of(json.dumps([{"id": "x", "conversations": message}]))
    assert [row["response_text"] for row in rows] == answers
    assert (note is None and notes == []) or any(n.startswith(note or "-") for n in notes)


@pytest.mark.parametrize("form", ["list", "text"])
def test_a_system_text_and_tools_are_part_of_each_request(form: str) -> None:
    tool = {"name": "tide", "description": "", "parameters": {}}
    tools = [tool] if form == "list" else json.dumps([tool])
    talk = {"system": "be brief", "tools": tools, "conversations": TALK[1:]}
    rows, notes = rows_of(json.dumps([talk]))
    assert notes == []
    for row in rows:
        body = json.loads(row["request_body"])
        assert body["messages"][0] == {"role": "system", "content": "be brief"}
        assert body["tools"] == [{"type": "function", "function": tool}]
        assert (row["tools"], row["message_roles"][0], row["message_bytes"][0]) == (1, "system", 8)


CALLS = [{"name": "tide", "arguments": {"at": "Cadiz"}}, {"name": "wind", "arguments": "{}"}]


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS])
def test_answers_of_tools_name_the_calls_before_them(calls: list[Any]) -> None:
    text = json.dumps(calls if len(calls) > 1 else calls[0], separators=(",", ":"))
    answers = [("observation", f"answer {i}") for i in range(len(calls))]
    talk = turns(("human", "hi"), ("function_call", text), *answers, ("gpt", "high"))
    rows, notes = rows_of(json.dumps([{"id": "a", "conversations": talk}]))
    assert notes == [] and [row["response_text"] for row in rows] == [text, "high"]
    _, call, *tools = json.loads(rows[1]["request_body"])["messages"]
    assert (call["role"], call["content"]) == ("assistant", None)
    functions = [one["function"] for one in call["tool_calls"]]
    assert [f["name"] for f in functions] == [c["name"] for c in calls]
    assert json.loads(functions[0]["arguments"]) == {"at": "Cadiz"}
    ids = [one["id"] for one in call["tool_calls"]]
    assert ids == [tool["tool_call_id"] for tool in tools] and len(set(ids)) == len(calls)
    back = again(rows)[0]["conversations"]
    assert [turn["from"] for turn in back] == ["human", "function_call", *["tool"] * len(calls), "gpt"]
    assert (
        rows_of(json.dumps([{"id": "a", "conversations": back}]))[0][1]["request_body"]
        == (rows[1]["request_body"])
    )


@pytest.mark.parametrize("call", ["soon", '{"call": 1}', json.dumps(CALLS), "[]"])
def test_answers_of_tools_without_their_calls_are_counted(call: str) -> None:
    talk = turns(("human", "hi"), ("function_call", call), ("tool", "7"), ("gpt", "high"))
    rows, notes = rows_of(json.dumps([{"id": "a", "conversations": talk}]))
    message = json.loads(rows[1]["request_body"])["messages"]
    assert message[1:] == [{"role": "assistant", "content": call}, {"role": "tool", "content": "7"}]
    assert len(notes) == 1 and notes[0].startswith("1 answers of tools")


def test_conversations_with_the_same_id_are_not_one() -> None:
    talk = {"id": "a", "conversations": TALK}
    rows, notes = rows_of(json.dumps([talk, talk, {"conversations": TALK, "id": "#3"}, talk]))
    assert [row["session"] for row in rows[::2]] == ["a", "a#1", "#3", "a#3"]
    assert len(notes) == 1 and notes[0].startswith("2 conversations have the id")


def test_what_is_not_kept_is_counted() -> None:
    talk = {"tools": "none", "rating": 3, "conversations": [{**turn, "weight": 1} for turn in TALK]}
    rows, notes = rows_of(json.dumps([talk, {"conversations": TALK, "tools": "[]", "system": ""}]))
    assert len(rows) == 4 and "tools" not in json.loads(rows[0]["request_body"])
    assert [note.split()[0] for note in notes] == ["1", "1", "1"]
    assert {"tools", "'rating'", "'weight'"} <= set(" ".join(notes).split())


def test_turns_may_be_texts_of_objects_and_calls_of_functions_are_answers() -> None:
    talk = [json.dumps(turn) for turn in turns(("human", "hi"), ("function_call", "{}"))]
    rows, notes = rows_of(json.dumps([{"conversations": talk}]))
    assert [row["response_text"] for row in rows] == ["{}"] and notes == []


def test_a_conversation_without_a_name_has_its_number() -> None:
    talk = {"conversations": TALK}
    rows, _ = rows_of(json.dumps([talk, {**talk, "id": 7}, {**talk, "id": "", "model": "m"}]))
    assert [row["session"] for row in rows[::2]] == ["#0", "7", "#2"]
    assert rows[4]["model"] == json.loads(rows[4]["request_body"])["model"] == "m"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ('[{"id": "a", "conversations": []}, {"id"', "element 1: the file was cut off"),
        ('"a"', "there is no JSON array"),
        ('{"id": "a"}', "conversation 0: conversations: is missing"),
        ('{"conversations": []}\n{"conversations": [}', "line 2: is not valid JSON"),
        ('[{"id": "a", "conversations": []}, 3]', "conversation 1: "),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(data: bytes | str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        rows_of(data)


# Where every answer follows a question, and nothing comes after the last answer, nothing is lost.
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
ROUNDS = st.lists(st.tuples(st.just("human"), TEXT, TEXT), min_size=1, max_size=4)
TALKS = st.lists(st.tuples(st.none() | TEXT, ROUNDS), max_size=5).map(
    lambda talks: [{"id": f"c{i}", "conversations": said_by(*talk)} for i, talk in enumerate(talks)]
)


def said_by(system: str | None, rounds: list[tuple[str, str, str]]) -> Turns:
    message = [(who, text) for _, ask, answer in rounds for who, text in (("human", ask), ("gpt", answer))]
    return turns(*([("system", system)] if system is not None else []), *message)


@given(talks=TALKS, seed=st.integers(0, 1 << 16))
def test_conversations_survive_wherever_their_turns_lie(talks: list[Any], seed: int) -> None:
    rows, _ = rows_of(json.dumps(talks))
    assert again(rows) == talks
    random.Random(seed).shuffle(rows)
    mixed = again(rows)
    assert sorted(mixed, key=lambda t: t["id"]) == talks
    first_seen = list(dict.fromkeys(row["session"] for row in rows))
    assert [talk["id"] for talk in mixed] == first_seen


def body(*messages: tuple[str, Any]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]})


def test_an_edited_question_becomes_a_conversation_of_its_own() -> None:
    rows = [
        {"session": "s", "turn": 0, "request_body": body(("user", "a")), "response_text": "1"},
        {"session": "s", "turn": 1, "request_body": body(("user", "b")), "response_text": "2"},
        {
            "session": "s",
            "turn": 2,
            "request_body": body(("user", "b"), ("assistant", " 2"), ("user", "c")),
            "response_text": "3",
        },
    ]
    talks, result = written(rows)
    found = {talk["id"]: [turn["value"] for turn in talk["conversations"]] for talk in talks}
    assert found == {"s": ["a", "1"], "s-branch-1": ["b", " 2", "c", "3"]}
    assert result.rows == 3
    assert [note for note in result.notes if note.startswith("1 sessions went on")]


def test_rows_without_session_stand_alone_and_the_same_name_of_two_captures_is_not_one() -> None:
    row = {"request_body": body(("user", "a")), "response_text": "1"}
    talks, _ = written([row, {**row, "id": "r0-7"}, *({**row, "session": "s", "capture": c} for c in "xy")])
    assert [t["id"] for t in talks] == ["conversation-0", "r0-7", "s", "s"]


def test_rows_without_text_are_dropped_and_counted() -> None:
    good = {"request_body": body(("user", "a")), "response_text": "1"}
    talks, result = written(
        [
            {**good, "request_body": None},
            {**good, "response_text": None},
            {**good, "request_body": "[]"},
            {**good, "request_body": "{}"},
            good,
        ]
    )
    assert len(talks) == result.rows == 1
    assert result.dropped == {"no request body": 1, "no response text": 1, "request without messages": 2}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"prompt": "p"}, [("human", "p")]),
        ({"input": "p", "instructions": "i"}, [("system", "i"), ("human", "p")]),
        (
            {"system": [{"type": "text", "text": "i"}], "messages": [{"role": "user", "content": "p"}]},
            [("system", "i"), ("human", "p")],
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "i"},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a"},
                            {"type": "image_url"},
                            {"type": "text", "text": "b"},
                        ],
                    },
                ]
            },
            [("system", "i"), ("human", "ab")],
        ),
        ({"messages": [{"role": "tool", "content": "42"}]}, [("tool", "42")]),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            [("gpt", '{"name":"f"}')],
        ),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, [("gpt", "a")]),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": 5}]}, [("gpt", "")]),
    ],
)
def test_every_kind_of_request_has_its_text(query: Any, message: list[tuple[str, str]]) -> None:
    talks, _ = written([{"request_body": json.dumps(query), "response_text": "!"}])
    assert talks[0]["conversations"] == turns(*message, ("gpt", "!"))
