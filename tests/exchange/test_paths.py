"""A path keeps its words and loses its keys; cleaned twice is cleaned once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.exchange.bounds import PATH_CHARS_MAX, clean_name, clean_path, holds_key

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
)  # fmt: skip
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
