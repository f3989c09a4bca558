"""A body says what was asked for in the endpoint's own words, and nothing that its server would refuse.

Captured bodies keep every byte that nobody wanted changed.
"""

import json
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyMaker, limit_of_body, prepare, server_of
from llmtap.load.options import BodyOptions, Server, parse_body_fields
from llmtap.workload.prompts.fitting import RowPrompts
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.tokenizer import OwnTokenizer, TokenCounter
from llmtap.workload.requests import Requests

TALK = Prompt(text="and now?", system="be brief", history=(("user", "hello"), ("assistant", "yes")))
PLAIN = Prompt(text='say "ü" 🙂')
IDS = Prompt(ids=(5, 6, 7))


def made(prompt: Prompt, output: int = 20, **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(BodyMaker(BodyOptions(**options)).body(prompt, output))
    return body


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and now?"},
]
BODIES: list[tuple[Prompt, dict[str, Any], dict[str, Any]]] = [
    (PLAIN, {}, {"messages": [{"role": "user", "content": 'say "ü" 🙂'}], "max_tokens": 20, **USAGE}),
    (TALK, {"model": "m"}, {"model": "m", "messages": MESSAGES, "max_tokens": 20, **USAGE}),
    (TALK, {"server": "openai"}, {"messages": MESSAGES, "max_completion_tokens": 20, **USAGE}),
    (
        TALK,
        {"server": "sglang", "min_tokens": True},
        {"messages": MESSAGES, "max_tokens": 20, "min_tokens": 20, "ignore_eos": True, **USAGE},
    ),
    (TALK, {"server": "vllm", "exact_output": False}, {"messages": MESSAGES, "max_tokens": 20, **USAGE}),
    (
        TALK,
        {"server": "openai", "min_tokens": True},
        {"messages": MESSAGES, "max_completion_tokens": 20, **USAGE},
    ),
    (TALK, {"stream": False}, {"messages": MESSAGES, "max_tokens": 20, "stream": False}),
    (TALK, {"temperature": 0.0}, {"messages": MESSAGES, "max_tokens": 20, "temperature": 0.0, **USAGE}),
    (
        TALK,
        {"endpoint": "completions"},
        {"prompt": "be brief\n\nhello\n\nyes\n\nand now?", "max_tokens": 20, **USAGE},
    ),
    (
        IDS,
        {"endpoint": "completions", "server": "vllm", "min_tokens": True},
        {"prompt": [5, 6, 7], "max_tokens": 20, "min_tokens": 20, "ignore_eos": True, **USAGE},
    ),
    (PLAIN, {"endpoint": "responses"}, {"input": 'say "ü" 🙂', "max_output_tokens": 20, "stream": True}),
    (
        TALK,
        {"endpoint": "responses", "server": "vllm", "min_tokens": True},
        {
            "instructions": "be brief",
            "input": MESSAGES[1:],
            "max_output_tokens": 20,
            "ignore_eos": True,
            "stream": True,
        },
    ),
    (
        TALK,
        {"endpoint": "responses", "server": "sglang"},
        {"instructions": "be brief", "input": MESSAGES[1:], "max_output_tokens": 20, "stream": True},
    ),
]


@pytest.mark.parametrize(("prompt", "options", "wanted"), BODIES)
def test_each_endpoint_and_server_gets_its_own(
    prompt: Prompt, options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert made(prompt, **options) == wanted
    assert BodyMaker(BodyOptions(**options)).output_exact == ("ignore_eos" in wanted)


@pytest.mark.parametrize("endpoint", ["chat.completions", "responses"])
def test_ids_become_text_where_somebody_can_tell(endpoint: str) -> None:
    def decode(ids: Sequence[int]) -> str:
        return " ".join(f"t{i}" for i in ids)

    maker = BodyMaker(BodyOptions(endpoint=endpoint), decode=decode)  # type: ignore[arg-type]
    assert b'"t5 t6 t7"' in maker.body(IDS, 3)
    for helpless in (None, lambda ids: None):
        with pytest.raises(
            ConfigError, match=f"^--endpoint: the prompts are token ids, which {endpoint} does"
        ) as t:
            BodyMaker(BodyOptions(endpoint=endpoint), decode=helpless).body(IDS, 3)  # type: ignore[arg-type]
        assert "--tokenizer" in (t.value.hint or "")


def test_the_users_fields_come_last_and_win() -> None:
    fields = parse_body_fields(
        ["top_p=0.9", 'stop=["x"]', "temperature=1", "ignore_eos=false", "lora = null"]
    )
    body = made(PLAIN, temperature=0.0, server="vllm", fields=fields)
    assert (body["top_p"], body["stop"], body["temperature"], body["ignore_eos"], body["lora"]) == (
        0.9,
        ["x"],
        1,
        False,
        None,
    )
    told = BodyMaker(BodyOptions(fields=parse_body_fields(['user="secret"']))).describe()
    assert told["fields"] == ["user"]
    assert "secret" not in str(told)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["top_p"], "expected NAME=JSON"),
        (["=1"], "expected NAME=JSON"),
        (["user=me"], "of 'user' is not JSON"),
        (["a=1", "a=2"], "'a' is given twice"),
        (["messages=[]"], "the workload sets it"),
        (["model=1"], "--model sets it"),
        (["stream=true"], "--stream or --no-stream sets it"),
        (["x=[1"], "is not JSON"),
    ],
)
def test_a_wrong_field_is_named(texts: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--body-field: .*{problem}"):
        parse_body_fields(texts)


CAPTURED = (
    b'{"model": "a", "messages":[{"role":"user",  "content":"caf\\u00e9"}],"n":1,"top_p":1.00,'
    b' "stream":true,"stream_options":{"include_usage":true},"x":{"b":1,  "a":[ ]}}'
)


def test_a_captured_body_keeps_each_value_it_need_not_lose() -> None:
    out = BodyMaker(BodyOptions(model="b", stream=False)).adapt_recorded(CAPTURED)
    assert out == (
        b'{"model":"b","messages":[{"role":"user",  "content":"caf\\u00e9"}],"n":1,"top_p":1.00,'
        b'"stream":false,"x":{"b":1,  "a":[ ]}}'
    )


CHANGES: list[tuple[bytes, dict[str, Any], bytes]] = [
    (b'{"a":1}', {}, b'{"a":1,"stream":true,"stream_options":{"include_usage":true}}'),
    (b'{"a":1}', {"stream": False}, b'{"a":1}'),
    (b'{"stream":null}', {"stream": False}, b'{"stream":false}'),
    (
        b'{"stream":true,"stream_options":{"chunk":5}}',
        {},
        b'{"stream":true,"stream_options":{"chunk":5,"include_usage":true}}',
    ),
    (
        b'{"stream":true,"stream_options":null}',
        {},
        b'{"stream":true,"stream_options":{"include_usage":true}}',
    ),
    (
        b'{"stream_options":{"include_obfuscation":false},"stream":true}',
        {"endpoint": "responses"},
        b'{"stream_options":{"include_obfuscation":false},"stream":true}',
    ),
    (
        b'{"stream":true,"k":1}',
        {"endpoint": "responses", "fields": {"k": msgspec.Raw(b"2")}},
        b'{"stream":true,"k":2}',
    ),
    (b"", {}, b""),
    (b"[1]", {}, b"[1]"),
    (b'{"a":', {}, b'{"a":'),
]


@pytest.mark.parametrize(("body", "options", "wanted"), CHANGES)
def test_only_the_way_of_answering_changes(body: bytes, options: dict[str, Any], wanted: bytes) -> None:
    assert BodyMaker(BodyOptions(**options)).adapt_recorded(body) == wanted


CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
RECORDED = [
    (CHAT, b'{"model":"a","messages":[]}', {}, None),
    (CHAT, b'{"model":"a","messages":[]}', {"model": "b", "replace_model": False}, None),
    (CHAT, b'{"model":"a","messages":[]}', {"model": "b"}, b'{"model":"b","messages":[]}'),
    (CHAT, b'{"messages":[],"stream":true}', {"stream": False}, b'{"messages":[],"stream":false}'),
    (
        CHAT,
        b'{"messages":[]}',
        {"stream": True},
        b'{"messages":[],"stream":true,"stream_options":{"include_usage":true}}',
    ),
    ("/v1/messages", b'{"messages":[]}', {"stream": True}, b'{"messages":[],"stream":true}'),
    ("/v1/responses", b'{"input":"x"}', {"stream": True}, b'{"input":"x","stream":true}'),
    (EMBEDDINGS, b'{"model":"e","input":"x"}', {}, None),
    (EMBEDDINGS, b'{"model":"e","input":"x"}', {"stream": True}, None),
    ("/v1/rerank", b'{"query":"q","documents":[]}', {"stream": True, "model": "b"}, None),
    ("/v1beta/models/m:generateContent", b'{"contents":[]}', {"model": "b", "stream": True}, None),
]


@pytest.mark.parametrize(("path", "body", "options", "wanted"), RECORDED)
def test_a_recorded_request_keeps_its_path_and_gets_only_what_was_asked_for(
    path: str, body: bytes, options: dict[str, Any], wanted: bytes | None
) -> None:
    maker = BodyMaker(BodyOptions(temperature=0.0, server="vllm", **options))
    assert maker.adapt_recorded(body, path) == (body if wanted is None else wanted)
    assert maker.destination(body, path) == path


def test_a_prompt_of_a_data_set_goes_to_the_endpoint_that_takes_it() -> None:
    maker = BodyMaker(BodyOptions(model="m"))
    assert maker.destination(b'{"messages":[]}', "") == ""
    assert maker.destination(b'{"prompt":"x"}', "") == "/v1/completions"
    assert maker.destination(b'{"input":"x"}', "") == "/v1/responses"
    assert json.loads(maker.adapt_recorded(b'{"input":"x"}')) == {"input": "x", "model": "m", "stream": True}


def test_the_settings_of_a_workload_are_sent_and_the_users_fields_win() -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "stop": ["x"], "seed": 3, "ignore_eos": False}
    options = BodyOptions(temperature=0.0, server="vllm", fields=parse_body_fields(["top_p=0.5"]))
    maker = BodyMaker(options.with_settings(settings))
    body = json.loads(maker.body(PLAIN, 5))
    assert (body["temperature"], body["top_p"], body["stop"], body["seed"]) == (0.7, 0.5, ["x"], 3)
    assert "ignore_eos" not in body
    told = maker.describe()
    assert (told["temperature"], told["settings"]) == (0.7, {"stop": ["x"], "seed": 3})
    assert not maker.output_exact


def test_the_description_has_what_was_sent_instead_of_what_was_meant() -> None:
    fields = parse_body_fields(["temperature=1", "ignore_eos=false", "max_tokens=9"])
    maker = BodyMaker(BodyOptions(temperature=0.0, server="vllm", fields=fields))
    told = maker.describe()
    assert (told["temperature"], told["ignore_eos"], told["output_limit"]) == (1, False, None)
    assert not maker.output_exact
    recorded = maker.describe(made=False, streamed=False)
    assert [recorded[name] for name in ("temperature", "output_limit", "stream")] == [None] * 3


@pytest.mark.parametrize(
    ("server", "fields", "control"),
    [
        ("auto", [], "max_tokens"),
        ("openai", [], "max_completion_tokens"),
        ("vllm", [], "max_tokens with ignore_eos"),
        ("vllm", ["ignore_eos=false"], "max_tokens"),
        ("auto", ["max_tokens=9"], "max_tokens"),
        ("auto", ["max_tokens=null"], None),
        ("auto", ['stop=["x"]'], "max_tokens and stop sequence"),
        ("auto", ['stop="x"', "max_tokens=null"], "stop sequence"),
        ("auto", ["stop=null"], "max_tokens"),
    ],
)
def test_the_control_of_output_length_is_the_one_that_was_sent(
    server: Server, fields: list[str], control: str | None
) -> None:
    maker = BodyMaker(BodyOptions(server=server, fields=parse_body_fields(fields)))
    assert maker.describe()["output_control"] == control
    # Recorded requests are sent as they are.
    assert maker.describe(made=False)["output_control"] is None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), values, max_size=6), st.sampled_from([None, 1, 4]))
def test_whatever_a_captured_body_holds_it_holds_afterwards(
    value: dict[str, Any], indent: int | None
) -> None:
    body = json.dumps(value, indent=indent).encode()
    out = json.loads(BodyMaker(BodyOptions(model="new")).adapt_recorded(body))
    changed = {"model", "stream", "stream_options"}
    assert {k: v for k, v in out.items() if k not in changed} == {
        k: v for k, v in value.items() if k not in changed
    }
    assert (out["model"], out["stream"], out["stream_options"]["include_usage"]) == ("new", True, True)


@pytest.mark.parametrize(
    ("models", "server"),
    [
        (b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","root":"m"}]}', "vllm"),
        (b'{"data":[{"id":"m","owned_by":"sglang"}]}', "sglang"),
        (b'{"data":[{"id":"sim","owned_by":"llmtap"}]}', "vllm"),
        (b'{"data":[{"id":"a","owned_by":"openai"},{"id":"b","owned_by":"system"}]}', "openai"),
        (b'{"data":[{"id":"a","owned_by":"vllm"},{"id":"b","owned_by":"sglang"}]}', "auto"),
        (b'{"data":[{"id":"a"}]}', "auto"),
        (b"<html>", "auto"),
        (b'{"data":7}', "auto"),
    ],
)
def test_a_server_tells_itself_by_its_models(models: bytes, server: str) -> None:
    assert server_of(models) == server


MAKER = BodyMaker(BodyOptions(model="m", endpoint="responses"))


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
        assert list(prepared.tokens) == [-1] * len(texts)
        assert prepared.lengths.n == 0


def test_a_trace_keeps_its_own_bodies_and_the_rest_is_made() -> None:
    requests = rows_of(4, 30)
    requests.bodies = [b'{"model":"m","stream":true,"a":1}', b"", b'{"model":"x","a": 2 }', b""]
    prompts = RowPrompts(requests, TokenCounter(OwnTokenizer()))
    with prepare(requests, prompts, MAKER) as prepared:
        assert prepared.body(0) == requests.bodies[0]
        assert prepared.body(2) == b'{"model":"m","a":2,"stream":true}'
        assert prepared.body(3) == MAKER.body(prompts.prompt(3), 4)
        assert list(prepared.tokens) == [-1, 30, -1, 30]
        assert prepared.lengths.describe() == {
            "n": 2,
            "exact": 2,
            "missed_min": 0,
            "missed_max": 0,
            "ways": {"reference tokenizer": 2},
        }


def test_a_row_with_neither_body_nor_prompt_is_named() -> None:
    requests = rows_of(2)
    requests.bodies = [b"{}", b""]
    with pytest.raises(ConfigError, match="row 2 has neither a body nor a prompt"):
        prepare(requests, None, MAKER)
    requests.bodies = [b"{}", b'{"a":1}']
    with prepare(requests, None, MAKER) as prepared:
        assert len(prepared) == 2


def test_a_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^TMPDIR: cannot store the prepared request bodies in .*nowhere"):
        prepare(rows_of(5), Said(["a"] * 5), MAKER)


def test_a_disk_that_fills_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "wb")  # noqa: SIM115 (`prepare` closes it)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full)
    with pytest.raises(ConfigError, match=r"^TMPDIR: .*No space left"):
        prepare(rows_of(5), Said(["a"] * 5), MAKER)
    assert full.closed


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"max_tokens": 7}', 7),
        (b'{"max_tokens": 7, "max_completion_tokens": 9}', 9),
        (b'{"max_output_tokens": 5, "max_tokens": null}', 5),
        (b'{"max_tokens": "7"}', None),
        (b'{"max_tokens": 18446744073709551615}', None),
        (b'{"messages": []}', None),
        (b"no JSON", None),
    ],
)
def test_the_limit_of_a_body_is_the_one_that_it_has(body: bytes, limit: int | None) -> None:
    assert limit_of_body(body) == limit
