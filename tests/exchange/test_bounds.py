"""The table of maximum lengths: complete, applied, and the one that SECURITY.md shows.

A path keeps its words and loses its keys; cleaned twice is cleaned once.
"""

import json
import re
import tracemalloc
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtap.exchange.bounds import BOUNDS, Budget, Share, bound, bounded
from llmtap.exchange.exchange import Exchange
from llmtap.exchange.observer import Observer
from llmtap.exchange.request import RequestReader
from llmtap.exchange.strings import PATH_CHARS_MAX, clean_name, clean_path, holds_key
from tests.support.expected import check_expected
from tests.support.traffic.exchanges import any_exchange, streamed

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
KEY = "sk-Ab3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6kL9nO2"
CLEANED = [name for name, limits in BOUNDS.items() if limits.fit is not BOUNDS["relay"].fit]


def string_fields(kind: Any, name: str = "") -> set[str]:
    """Names of the fields that hold strings, in lists, objects and nested records too."""
    if get_origin(kind) in (Union, types.UnionType):
        return set().union(*(string_fields(one, name) for one in get_args(kind)))
    if is_dataclass(kind):
        hints = get_type_hints(kind, localns={"array": list})  # an array of numbers has no strings
        inner = (string_fields(hints[f.name], f"{name}.{f.name}" if name else f.name) for f in fields(kind))
        return set().union(*inner)
    holds = kind is str or (get_origin(kind) in (list, dict, tuple, set) and str(kind).find("str") >= 0)
    return {name} if holds else set()


def section(title: str) -> list[list[str]]:
    """Rows of the table below a heading of SECURITY.md, without its head."""
    text = SECURITY.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_string_of_an_exchange_has_a_bound() -> None:
    assert string_fields(Exchange) == set(BOUNDS)


def test_the_table_in_the_security_page_is_the_one_in_the_code(pytestconfig: pytest.Config) -> None:
    rows = (
        f"| `{name}` | {limits.chosen_by} | {limits.chars:,} |"
        f" {'' if limits.members == 1 else f'{limits.members:,}'} |\n"
        for name, limits in BOUNDS.items()
    )
    head = "| string | chosen by | characters | members |\n|---|---|---|---|\n"
    before, _, rest = SECURITY.read_text().partition(head)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    check_expected(SECURITY, f"{before}{head}{''.join(rows)}{after}", pytestconfig)


def test_every_promise_of_the_security_page_has_a_test() -> None:
    promises = section("Promises and their tests")
    assert len(promises) >= 10
    for _, named in promises:
        for place in re.findall(r"`([^`]+)`", named):
            file, _, test = place.partition("::")
            path = SECURITY.parent / file
            assert path.is_file(), place
            assert re.search(rf"^(?:async )?def {re.escape(test)}\(", path.read_text(), re.MULTILINE), place


def test_every_field_that_a_peer_chooses_is_searched_for_keys() -> None:
    peers = {name for name, limits in BOUNDS.items() if limits.chosen_by in ("client", "upstream")}
    # A tenant's key becomes its hash (test_tenants.py); a body is redacted (test_redaction.py).
    assert set(CLEANED) == peers - {"tenant", "text.request_body", "text.response_text"}


@pytest.mark.parametrize("name", CLEANED)
def test_a_key_is_removed_wherever_it_begins(name: str) -> None:
    most = BOUNDS[name].chars
    for at in {0, 5, most // 2, *range(max(0, most - 50), most + 3), 1_100}:
        text = "/" * at + KEY + "." * 2_000
        found = bounded(name, text)
        assert len(found) <= most
        assert not any(KEY[i : i + 6] in found for i in range(len(KEY) - 6)), at
        assert bounded(name, found) == found


@given(st.text("sk-_hgpt.eyJ01aZ/ :", max_size=700), st.sampled_from(CLEANED))
def test_a_bounded_string_fits_and_has_no_key(text: str, name: str) -> None:
    found = bounded(name, text)
    assert len(found) <= BOUNDS[name].chars
    assert not holds_key(found) or name == "path"  # whose own tests are below


@settings(max_examples=30)
@given(any_exchange())
def test_a_usual_exchange_stays_as_it_is(x: Exchange) -> None:
    before = {f.name: getattr(x, f.name) for f in fields(x)}
    bound(x)
    assert {f.name: getattr(x, f.name) for f in fields(x)} == before


def test_lists_and_objects_are_cut_in_all_that_they_hold() -> None:
    x = streamed(1)
    many = {f"n{i}": {"inner": i, KEY: "v" * 9_000} for i in range(500)}
    x.usage, x.server_timing = many, [{"name": "n" * 9_000} for _ in range(5_000)]
    bound(x)
    assert 0 < sum(1 for _ in members(x.usage)) <= BOUNDS["usage"].members
    assert 0 < sum(1 for _ in members(x.server_timing)) <= BOUNDS["server_timing"].members
    texts = [one for one in (*members(x.usage), *members(x.server_timing)) if isinstance(one, str)]
    assert max(map(len, texts)) <= 64
    assert KEY not in str(x.usage)


def members(value: object) -> Any:
    """Every value in lists and objects, and none of their names."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield one if not isinstance(one, dict | list) else None
            yield from members(one)


@pytest.mark.parametrize(("method", "shown"), [("X" * 32, "X" * 32), ("X" * 33, ""), (KEY[:32], "*")])
def test_a_method_is_short_and_no_key(method: str, shown: str) -> None:
    x = streamed(1)
    x.method = ""
    RequestReader(x, f"{method} /v1/completions HTTP/1.1\r\nhost: g\r\n\r\n".encode())
    assert x.method == shown


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/chat/completions", {"model": "M", "choices": [{"index": 0, "delta": {"content": "a"}}]}),
        ("/v1/completions", {"model": "M", "choices": [{"index": 0, "text": "a"}]}),
        ("/v1/responses", {"type": "response.created", "response": {"id": "r", "model": "M"}}),
        ("/v1/messages", {"type": "message_start", "message": {"id": "m", "model": "M"}}),
        ("/api/chat", {"model": "M", "message": {"role": "assistant", "content": "a"}, "done": False}),
        ("/completion", {"model": "M", "content": "a", "stop": False}),
        ("/api/v1/chat", {"type": "chat.start", "model_instance_id": "M"}),
    ],
)
def test_an_open_stream_does_not_hold_a_long_name(path: str, event: dict[str, Any]) -> None:
    o = Observer("r", 1, 0, 0, f"POST {path} HTTP/1.1\r\nhost: g\r\n\r\n".encode())
    o.request_end(0)
    o.response_head(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", 1, 0)
    name = event.get("type", "message")
    data = f"event: {name}\ndata: {json.dumps(event)}\n\n".replace('"M"', f'"{"m" * 8_000_000}"').encode()
    tracemalloc.start()
    try:
        o.response_data(data, 2, 0)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < 1_000_000
    x = o.finish(3, "complete", None, None, 0, 0, 0, 0)
    assert x.response_model == x.model == "m" * 256


BYTES = 10_000
UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
REQUEST = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 3_000}]}).encode()
TEXT = {
    "object": "chat.completion",
    "model": "tiny-1",
    "choices": [{"index": 0, "message": {"content": "y"}}],
}


class Bodies:
    """A budget that knows what is left of it and how often it was short."""

    def __init__(self) -> None:
        self.shortages = 0
        self.budget = Budget(BYTES, self._short)

    def _short(self) -> None:
        self.shortages += 1


def observer(bodies: Bodies, head: bytes = UPLOAD % len(REQUEST)) -> Observer:
    return Observer("r", 1, 0, 0, head, bodies=bodies.budget)


def end(o: Observer) -> Exchange:
    return o.finish(9, "complete", None, None, 0, 0, 0, 0)


def test_small_pieces_count_for_what_they_take() -> None:
    bodies = Bodies()
    o = observer(bodies)
    for _ in range(1_000):
        o.request_data(b"ab", 1)
    assert len(o._request._body) < 200 and bodies.shortages == 1, "it is told once"


@pytest.fixture
def short() -> Iterator[Bodies]:
    """Bodies with room for 50 bytes; others give theirs back in the end."""
    bodies = Bodies()
    others = Share(bodies.budget)
    assert others.take(BYTES - 50)
    yield bodies
    assert (bodies.budget.free_bytes, bodies.shortages) == (50, 1)
    others.close()
    assert bodies.budget.free_bytes == BYTES


def test_a_request_that_finds_no_room_is_measured_without_its_body(short: Bodies) -> None:
    o = observer(short)
    _request(o)
    o.response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 2, 1)
    x = end(o)
    assert (x.model, x.status) == (None, 200)


def test_an_answer_that_finds_no_room_is_counted_and_not_understood(short: Bodies) -> None:
    o = observer(short)
    o.response_head(JSON % 100, 2, 1)
    for _ in range(4):
        o.response_data(b'{"a":"' + b"x" * 20, 3, 1)
    x = end(o)
    assert (x.unparsed_events, x.timeline.events.sizes.tolist(), x.reads) == (1, [104], 4)


def _half_request(o: Observer) -> None:
    o.request_data(REQUEST[:500], 1)


def _request(o: Observer) -> None:
    o.request_data(REQUEST, 1)
    o.request_end(1)


def _answered_in_part(o: Observer) -> None:
    _request(o)
    o.response_head(JSON % 1_000, 2, 1)
    o.response_data(json.dumps(TEXT).encode()[:-5], 3, 1)


def _answered_twice(o: Observer) -> None:
    _answered_in_part(o)
    _answered_in_part(o)


def _answered_by_the_line(o: Observer) -> None:
    _answered_in_part(o)
    o.response_data(b"\n", 3, 1)


def _answered_and_lost(o: Observer) -> None:
    o.response_head(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n", 2, 1
    )
    o.response_data(b'4\r\n{"a"\r\n', 3, 1)
    o.response_data(b"no chunk", 4, 1)


def _answered_more_than_all(o: Observer) -> None:
    _answered_in_part(o)
    o.response_end(4)
    o.response_data(b"{}", 5, 1)
    _half_request(o)


@pytest.mark.parametrize(
    "work",
    [
        _half_request,
        _request,
        _answered_in_part,
        _answered_twice,
        _answered_by_the_line,
        _answered_and_lost,
        _answered_more_than_all,
    ],
)
@pytest.mark.parametrize("over", [end, Observer.abandon])
def test_all_is_given_back(work: Callable[[Observer], None], over: Callable[[Observer], object]) -> None:
    for head in (UPLOAD % len(REQUEST), b"not HTTP\r\n\r\n"):
        bodies = Bodies()
        o = observer(bodies, head)
        work(o)
        over(o)
        assert (bodies.budget.free_bytes, bodies.shortages) == (BYTES, 0)


STAY = [
    "/",
    "/v1/chat/completions",
    "/api/v2/chat/completions-detection",
    "/generate_stream",
    "/v1/models/meta-llama/Llama-3.1-8B-Instruct",
    "/v1/models/meta-llama%2FLlama-3.1-8B-Instruct",
    "/v1beta/models/gemini-2.5-flash-preview-05-20:streamGenerateContent",
    "/openai/deployments/gpt-4o-2024-08-06/chat/completions",
    "/v1/projects/my-project/locations/us-central1/models/claude-3-5-sonnet@20240620:rawPredict",
    "/model/us.anthropic.claude-sonnet-4-5-20250929-v1:0/converse-stream",
    "/ai/run/@cf/meta/llama-3.1-8b-instruct",
    "/models/neuralmagic/Meta-Llama-3.1-405B-Instruct-quantized.w4a16",
]


@pytest.mark.parametrize("path", STAY)
def test_words_versions_and_names_of_models_stay(path: str) -> None:
    assert clean_path(path) == path


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("/v1/sk-abcdefgh12345678/chat/completions", "/v1/*/chat/completions"),
        ("/v1/key/swordfish/chat", "/v1/key/*/chat"),
        ("/v1/api-key/swordfish", "/v1/api-key/*"),
        ("/token/v1/chat", "/token/v1/chat"),
        ("/v1/users/alice/chat", "/v1/users/*/chat"),
        ("/v1/responses/resp_68af4030592c81938ec0a5fbab4a3e9f", "/v1/responses/*"),
        ("/v1/0f8fad5b-d9cb-469f-a165-70867728950e/x", "/v1/*/x"),
        ("/bot123456:ABC-DEF1234ghIkl-zyx57W2v1u123ew11/send", "/*/send"),
        ("/v1/ann@example.com/x", "/v1/*/x"),
        ("/v1/%73k-abcdefgh12345678/x", "/v1/*/x"),
        ("/v1/%252525252573k-abcdefgh12345678/x", "/v1/*/x"),
        ("/v1/models%2Fsk-abcdefgh12345678/x", "/v1/*/x"),
        ("/search/my%20secret%20question", "/search/*"),
        ("/v1;jsessionid=abc/x", "/*/x"),
        ("/accounts/12345/x", "/accounts/*/x"),
        ("/v1/dGhpcyBpcyBhIHNlY3JldA==/x", "/v1/*/x"),
        ("/v1/" + "x" * 81, "/v1/*"),
        ("/v1/d\xfc/x", "/v1/*/x"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_keys_ids_and_text_go(path: str, clean: str) -> None:
    assert clean_path(path) == clean


_SEGMENTS = st.one_of(
    st.sampled_from(["v1", "chat", "models", "key", "gpt-4o", "%2e%2E", "%", "%%41", "*", "", "a%2fb"]),
    st.text(max_size=90),
    st.text("abcXYZ019-_%.:=@", max_size=30),
)


@given(st.lists(_SEGMENTS, max_size=60).map("/".join))
def test_a_clean_path_is_short_and_stays_as_it_is(path: str) -> None:
    clean = clean_path(path)
    assert len(clean) <= PATH_CHARS_MAX
    assert clean_path(clean) == clean
    assert set(clean.split("/")) <= {*path.split("/"), "*"}


@given(
    st.sampled_from(["sk-", "sk-ant-api03-", "ghp_", "hf_", "xoxb-", ""]),
    st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=10, max_size=12),
    st.text("0123456789abcdef", min_size=32, max_size=32).filter(lambda s: not s.isalpha()),
    st.booleans(),
)
def test_a_key_in_a_path_is_found_however_it_is_encoded(form: str, a: str, b: str, encoded: bool) -> None:
    key = f"{form}{a}{b}"
    shown = "".join(f"%{ord(c):02x}" for c in key) if encoded and len(key) < 60 else key
    assert clean_path(f"/v1/{shown}/chat") == "/v1/*/chat"


MODELS = [
    "o4-mini-deep-research-2025-06-26",
    "ft:gpt-3.5-turbo-0125:sk-telecom::9H4bXz2Q",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
    "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
    "arn:aws:bedrock:us-east-1:123456789012:imported-model/a1b2c3d4e5f6",
    "hf-internal-testing/tiny-random-LlamaForCausalLM",
    "xai-grok-2-vision-1212",
    "hf_tinyrandomllamaforcausallm",
    "nvapi-nemotron-4-340b-instruct",
    "mistral-sk-7b-instruct-v0-3",
    "sk-whisper-large-v3-turbo",
    "/models/checkpoints/3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "",
]
KEYS = [
    "sk-ant-api03-Zx81kQ2mPq7Lr5Ts9Uv3Wx1Yz-AA",
    "sk-live-51H8secret",
    "sk-KdN7p3QaTz81bWcV0xYu5g",
    "gsk_a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6",
    "hf_QwErTyUiOpAsDfGhJkLz1xCvBnMqWeRtYu",
    "nvapi-0a1B2c3D4e5F6g7H8i9J0-k1L2m3N4o5P6q7R8s9T0",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "glpat-x1Y2z3A4b5-C6d7E8f9G0",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "xoxb-123456789012-abcdefGHIJKL",
    "hf_AbcdefghijklmnopqrstuvwxyzAbcdefgh",
    "SG.abcdefgh1234567890abcd.abcdefghijklmnopqrstuvwxyz1234567890",
    "pcsk_2a1b2c_4d5e6f7g8h9i0j1k2l3m4n5o6p",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
]


@pytest.mark.parametrize("name", MODELS)
def test_the_name_of_a_model_stays(name: str) -> None:
    assert clean_name(name) == name


@pytest.mark.parametrize("around", ["{}", "openai/{}", "Bearer {}"])
@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_place_of_a_name_does_not(key: str, around: str) -> None:
    assert holds_key(around.format(key))
    assert clean_name(around.format(key)) == "*"


@pytest.mark.parametrize(
    "key", ["sk-abcdefghijklmnopqrstuvwxyz0123456789", "sk-proj-" + "a1" * 20, "ghp_" + "a1" * 18]
)
@pytest.mark.parametrize("at", [0, 1, 200, 216, 230, 250, 255])
def test_a_key_behind_a_word_does_not_stay(key: str, at: int) -> None:
    assert clean_name("m" * at + key) == "*"
