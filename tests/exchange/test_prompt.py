"""Whatever a body is, reading it never raises; each endpoint's form gives the same messages for its words."""

import json
import random
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.exchange.prompt import MESSAGES_MAX, PromptShape, read_prompt

CHAT = "chat.completions"


def read(body: Any, endpoint: str | None = CHAT) -> PromptShape:
    prompt = read_prompt(msgspec.json.encode(body), endpoint)
    assert prompt is not None
    return prompt


def seen(prompt: PromptShape) -> list[tuple[str, str]]:
    return [(m.role, m.text) for m in prompt.messages]


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


USER_HI = [("user", "hi")]
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at":"Brest"}'}}


@pytest.mark.parametrize(
    ("endpoint", "body", "messages"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, USER_HI),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [part("text", text="h"), part("text", text="i")]}]},
            USER_HI,
        ),
        (CHAT, {"messages": [{"role": "user", "content": part("text", text="hi")}]}, USER_HI),
        (
            CHAT,
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": None}]},
            [("system", "s"), ("user", "")],
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]},
            [("assistant", 'xtide{"at":"Brest"}')],
        ),
        (
            CHAT,
            {
                "messages": [
                    {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                    {"role": "function", "name": "f", "content": "3"},
                ]
            },
            [("assistant", "f{}"), ("function", "3")],
        ),
        (CHAT, {"messages": [{"role": "assistant", "refusal": "no"}]}, [("assistant", "no")]),
        ("completions", {"prompt": "a"}, [("prompt", "a")]),
        ("completions", {"prompt": ["a", "b"]}, [("prompt", "a"), ("prompt", "b")]),
        ("completions", {"prompt": "a", "suffix": "z"}, [("prompt", "a"), ("suffix", "z")]),
        (
            "responses",
            {"instructions": "s", "input": [{"role": "user", "content": "hi"}]},
            [("system", "s"), *USER_HI],
        ),
        (
            "responses",
            {
                "input": [
                    part("message", role="user", content=[part("input_text", text="hi")]),
                    part("reasoning", summary=[part("summary_text", text="hm")]),
                    part("function_call", name="tide", arguments="{}", call_id="c"),
                    part("function_call_output", call_id="c", output="3 m"),
                    part("message", role="assistant", content=[part("output_text", text="3")]),
                ]
            },
            [*USER_HI, ("assistant", ""), ("assistant", "tide{}"), ("tool", "3 m"), ("assistant", "3")],
        ),
        (
            "messages",
            {"system": "s", "messages": [{"role": "user", "content": "hi"}]},
            [("system", "s"), *USER_HI],
        ),
        (
            "messages",
            {
                "system": [part("text", text="s", cache_control={})],
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            part("thinking", thinking="hm", signature="x"),
                            part("text", text="so"),
                            part("tool_use", id="t", name="tide", input={"at": "Brest"}),
                        ],
                    },
                    {
                        "role": "user",
                        "content": [part("tool_result", tool_use_id="t", content=[part("text", text="3 m")])],
                    },
                ],
            },
            [("system", "s"), ("assistant", 'sotide{"at":"Brest"}'), ("user", "3 m")],
        ),
        ("ollama.chat", {"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}, USER_HI),
        (
            "ollama.chat",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"function": {"name": "tide", "arguments": {"at": "Brest"}}}],
                    }
                ]
            },
            [("assistant", 'tide{"at":"Brest"}')],
        ),
        ("ollama.generate", {"system": "s", "prompt": "hi"}, [("system", "s"), ("prompt", "hi")]),
        ("generate", {"inputs": "hi"}, [("prompt", "hi")]),
        ("generate", {"text": "hi"}, [("prompt", "hi")]),
        ("llamacpp.completion", {"prompt": "hi"}, [("prompt", "hi")]),
        (
            "llamacpp.completion",
            {"prompt": {"prompt_string": "hi", "multimodal_data": ["x"]}},
            [("prompt", "hi")],
        ),
        (
            "cohere.chat",
            {
                "messages": [
                    {"role": "user", "content": part("text", text="hi")},
                    {"role": "assistant", "tool_plan": "I look", "tool_calls": [CALL]},
                ]
            },
            [*USER_HI, ("assistant", 'I looktide{"at":"Brest"}')],
        ),
        (
            "lmstudio.chat",
            {"system_prompt": "s", "input": [part("text", content="hi"), part("image", data_url="data:x")]},
            [("system", "s"), *USER_HI, ("user", "")],
        ),
        (None, {"messages": [{"role": "user", "content": "hi"}]}, USER_HI),
        (None, {"input": "hi"}, USER_HI),
        # Another form than the endpoint's.
        ("completions", {"messages": [{"role": "user", "content": "hi"}]}, USER_HI),
        (CHAT, {"input": "hi"}, USER_HI),
        (CHAT, {}, []),
    ],
)
def test_each_endpoint_has_its_messages(endpoint: str, body: Any, messages: list[tuple[str, str]]) -> None:
    prompt = read(body, endpoint)
    assert seen(prompt) == messages
    assert prompt.shape.roles == [role for role, _ in messages]
    assert list(prompt.shape.sizes) == [m.size for m in prompt.messages]
    assert prompt.chat == bool(messages and messages[-1][0] not in ("prompt", "suffix"))


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'"x"', b"null", b"{", b"\xff{}", b"{}", b'{"model":"m"}', b'{"messages":[]}', b"{\0}"],
)
def test_what_asks_nothing_that_we_know_is_none(body: bytes) -> None:
    assert read_prompt(body, None) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 7, "max_tokens": 5}, {"max_tokens": 7}),
        ({"max_output_tokens": 9.0}, {"max_tokens": 9}),
        ({"options": {"num_predict": 3, "temperature": 0.5}}, {"max_tokens": 3, "temperature": 0.5}),
        ({"parameters": {"max_new_tokens": 3, "top_p": 0.9}}, {"max_tokens": 3, "top_p": 0.9}),
        ({"sampling_params": {"max_new_tokens": 3, "n": 2}}, {"max_tokens": 3, "n": 2}),
        (
            {"max_tokens": "5", "temperature": True, "n": 1.5, "top_p": None},
            {"max_tokens": None, "temperature": None, "n": None, "top_p": None},
        ),
        (
            {"max_tokens": 10**30, "n": 10**12, "temperature": 1e300},
            {"max_tokens": None, "n": None, "temperature": None},
        ),
        ({"tools": [{}, {}]}, {"tools": 2}),
        ({"tools": "many"}, {"tools": None}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"a": 1}}},
            {"response_format": "json_schema"},
        ),
        ({"response_format": {"type": "my secret words"}}, {"response_format": "other"}),
        ({"response_format": {"type": "sk-live-51H8secret"}}, {"response_format": "other"}),
        ({"format": "json"}, {"response_format": "json"}),
        ({"format": {"type": "object"}}, {"response_format": "json_schema"}),
    ],
)
def test_parameters_are_found_where_each_dialect_has_them(body: Any, expected: dict[str, Any]) -> None:
    got = read({"messages": [{"role": "user", "content": "hi"}], **body}).shape
    assert {name: getattr(got, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("role", "kept"),
    [
        ("critic", "critic"),
        ("my.role-2", "my.role-2"),
        ("x" * 32, "x" * 32),
        ("x" * 33, "other"),
        ("tell nobody", "other"),
        ("", "other"),
        (None, "other"),
        (7, "other"),
        ("rôle", "other"),
        ("user\n", "other"),
        ("sk-live-51H8secret", "other"),
        ("0f8fad5bd9cb469fa16570867728950e", "other"),
    ],
)
def test_a_role_carries_no_text(role: Any, kept: str) -> None:
    assert read({"messages": [{"role": role, "content": "hi"}]}).shape.roles == [kept]


@pytest.mark.parametrize(
    ("prompt", "parts", "size"),
    [
        ([1, 2, 3], [[array("I", [1, 2, 3])]], 12),
        ([[1, 2], [3]], [[array("I", [1, 2])], [array("I", [3])]], 12),
    ],
)
def test_token_ids_stay_ids_and_count_four_bytes(prompt: Any, parts: list[Any], size: int) -> None:
    got = read({"prompt": prompt}, "completions")
    assert [m.parts for m in got.messages] == parts
    assert sum(got.shape.sizes) == size


def test_what_is_no_text_is_a_mark_that_tells_it_apart() -> None:
    for prompt in ([-1, 5], [1 << 40], [1.5], [None], [{"a": 1}, "b"]):
        for message in read({"prompt": prompt}, "completions").messages:
            assert all(isinstance(p, bytes | str) for p in message.parts)
    call = read({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}).messages[0]
    text = read({"messages": [{"role": "assistant", "content": call.text}]}).messages[0]
    assert call.text == text.text and call != text
    tools = [read({"messages": [], "tools": tools}).tools for tools in ([], [{"name": "a"}], [{"name": "b"}])]
    assert tools[0] == b"" and tools[1] and tools[1] != tools[2]


def test_media_count_no_bytes_and_differ() -> None:
    def with_picture(url: str, **more: Any) -> PromptShape:
        picture = part("image_url", image_url={"url": url}, **more)
        return read({"messages": [{"role": "user", "content": [part("text", text="see"), picture, "it"]}]})

    one, other = with_picture("data:a"), with_picture("data:b")
    assert one.shape.images == 1 and list(one.shape.sizes) == [5]
    first, mark, last = one.messages[0].parts
    assert (first, last) == ("see", "it") and isinstance(mark, bytes)
    assert other.messages[0].parts[1] != mark
    # Where a cache may end is no part of the picture.
    assert with_picture("data:a", cache_control={"type": "ephemeral"}).messages == one.messages


@pytest.mark.parametrize(
    "media",
    [
        part("image_url", image_url={"url": "x"}),
        part("input_image", image_url="x"),
        part("image", source={}),
        part("input_audio", input_audio={"data": "x"}),
        part("file", file={"file_id": "f"}),
        part("document", source={}),
        part("video_url", video_url={}),
        {"image_url": "x"},
    ],
)
def test_every_kind_of_media_is_counted(media: Any) -> None:
    assert read({"messages": [{"role": "user", "content": [media]}]}).shape.images == 1


def test_reasoning_stands_apart() -> None:
    for message in (
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
        {"role": "assistant", "content": [part("thinking", thinking="hm"), part("text", text="so")]},
        {"role": "assistant", "content": [part("thinking", thinking=[part("text", text="hm")]), "so"]},
    ):
        (got,) = read({"messages": [message]}).messages
        assert (got.thinking, got.parts, got.size) == ("hm", ["so"], 4)


@pytest.mark.parametrize(
    ("message", "result"),
    [
        ({"role": "tool", "content": "3 m"}, True),
        ({"role": "user", "content": [part("tool_result", content="3 m")]}, True),
        ({"role": "user", "content": [part("tool_result", content="3 m"), part("text", text="and?")]}, False),
        ({"role": "user", "content": []}, False),
    ],
)
def test_results_of_tools_are_known(message: Any, result: bool) -> None:
    assert read({"messages": [message]}).messages[0].result is result


def test_a_conversation_has_an_end() -> None:
    prompt = read({"messages": [{"role": "user"}] * (MESSAGES_MAX + 1), "max_tokens": 5})
    assert prompt.messages == [] and prompt.shape.max_tokens == 5
    assert read({"prompt": ["a"] * (MESSAGES_MAX + 1)}, "completions").messages == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' + b"[" * 100_000,
        b'{"messages":[{"content":'
        + b'[{"type":"tool_result","content":' * 300
        + b'"x"'
        + b"}]" * 300
        + b"}]}",
        b'{"messages":[{"content":[{"type":"thinking","thinking":' + b"[" * 900 + b"]" * 900 + b"}]}]}",
        b'{"messages":[{"content":"' + b"x" * (4 << 20) + b'"}]}',
        b'{"messages":[{"content":"\\ud800"}]}',
        b'{"messages":{"a":1},"tools":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=range(6),
)
def test_bodies_made_to_hurt_do_not(body: bytes) -> None:
    for endpoint in (CHAT, "responses", None):
        prompt = read_prompt(body, endpoint)
        assert prompt is None or len(prompt.shape.sizes) == len(prompt.messages)


_KEYS = st.sampled_from(
    [
        "messages",
        "role",
        "content",
        "type",
        "text",
        "input",
        "prompt",
        "tool_calls",
        "function",
        "name",
        "thinking",
        "arguments",
        "system",
        "images",
        "tools",
        "max_tokens",
        "options",
        "response_format",
        "output",
        "summary",
        "context",
        "prompt_string",
        "reasoning",
        "user",
        "assistant",
        "tool_result",
        "function_call",
        "image_url",
    ]
)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _KEYS
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=30,
)
_ENDPOINTS = st.sampled_from(
    [
        CHAT,
        "completions",
        "responses",
        "messages",
        "embeddings",
        "ollama.chat",
        "ollama.generate",
        "generate",
        "tgi.generate_stream",
        "llamacpp.completion",
        "cohere.chat",
        "lmstudio.chat",
        "realtime",
        None,
    ]
)


@settings(max_examples=200)
@given(st.dictionaries(_KEYS, _JSON, max_size=6), _ENDPOINTS)
def test_any_json_under_any_endpoint_is_read_or_none(body: Any, endpoint: str | None) -> None:
    prompt = read_prompt(json.dumps(body).encode(), endpoint)
    if prompt is None:
        return
    assert [m.size for m in prompt.messages] == list(prompt.shape.sizes)
    for message in prompt.messages:
        texts = [isinstance(p, str) for p in message.parts]
        assert not any(a and b for a, b in pairwise(texts)), "texts side by side"
        assert "" not in message.parts


@given(st.text(min_size=1), st.integers(0, 2**32))
def test_how_a_text_is_cut_into_parts_makes_no_difference(text: str, seed: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    at = random.Random(seed).randrange(len(text) + 1)
    whole = read({"messages": [{"role": "user", "content": text}]})
    cut = [part("text", text=text[:at]), part("text", text=text[at:])]
    assert read({"messages": [{"role": "user", "content": cut}]}).messages == whole.messages
    assert list(whole.shape.sizes) == [len(text.encode())]
