"""Who asks, by an operator's rules; and an API key is never in any answer."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.channel.frames import FrameKind, Hello
from llmtap.clock import ManualClock
from llmtap.errors import ConfigError
from llmtap.meter.admin.views import metrics_of
from llmtap.meter.options import MeterOptions, TenantOptions, TenantRule
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.tenants import OTHER, REFUSED_PLACES_MAX, Labels, Tenants
from llmtap.protocol.http1 import parse_request_head

KEY = "sk-live-51H8secret"


def who(
    *rules: dict[str, Any],
    headers: str = "",
    path: str = "/v1/chat/completions",
    body: Any = None,
    salt: str = "pepper",
    **options: Any,
) -> str:
    raw = f"POST {path} HTTP/1.1\r\nhost: g\r\n{headers}\r\n".encode("latin-1")
    made = TenantOptions(rules=tuple(TenantRule(**rule) for rule in rules), **options)
    return Tenants(made, salt).identify(parse_request_head(raw), path, lambda: body)


def test_the_default_is_the_header_of_llm_d_and_nothing_else() -> None:
    raw = b"POST / HTTP/1.1\r\nhost: g\r\nX-LLM-D-Inference-Fairness-ID: team-a\r\napi-key: x\r\n\r\n"
    tenants = Tenants(TenantOptions(), "")
    assert tenants.identify(parse_request_head(raw), "/", dict) == "team-a"
    assert tenants.identify(parse_request_head(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n"), "/", dict) == "default"


@pytest.mark.parametrize(
    ("rule", "about", "tenant"),
    [
        ({"header": "X-Team"}, {"headers": "x-team:  red \r\n"}, "red"),
        ({"header": "X-Team"}, {"headers": "x-team:   \r\n"}, "default"),
        ({"header": "X-Team", "name": "anybody"}, {"headers": "x-team: red\r\n"}, "anybody"),
        ({"body": "user"}, {"body": {"user": "ann"}}, "ann"),
        ({"body": "user"}, {"body": {"user": 42}}, "42"),
        ({"body": "user"}, {"body": {"user": True}}, "default"),
        ({"body": "user"}, {"body": {"user": {"a": 1}}}, "default"),
        ({"body": "user"}, {"body": ["user"]}, "default"),
        ({"body": "user"}, {"body": None}, "default"),
        ({"body": "metadata.team"}, {"body": {"metadata": {"team": "blue"}}}, "blue"),
        ({"body": "metadata.team"}, {"body": {"metadata": "blue"}}, "default"),
        ({"path": "/teams/([^/]+)/"}, {"path": "/teams/green/v1/completions"}, "green"),
        ({"path": "/teams/([^/]+)/"}, {"path": "/v1/teams/green/"}, "default"),
        ({"path": "/internal/", "name": "staff"}, {"path": "/internal/v1"}, "staff"),
    ],
)
def test_a_rule_finds_its_value(rule: dict[str, Any], about: dict[str, Any], tenant: str) -> None:
    assert who(rule, **about) == tenant


def test_the_first_rule_that_finds_a_value_wins() -> None:
    rules = ({"header": "x-team"}, {"body": "user"}, {"api_key": True})
    headers = f"authorization: Bearer {KEY}\r\n"
    assert who(*rules, headers=headers + "x-team: a\r\n", body={"user": "u"}) == "a"
    assert who(*rules, headers=headers, body={"user": "u"}) == "u"
    assert who(*rules, headers=headers, body={}).startswith("key-")
    assert who(*rules) == "default"


@pytest.mark.parametrize(
    "headers",
    [f"Authorization: Bearer {KEY}\r\n", f"authorization: bearer  {KEY} \r\n", f"X-Api-Key: {KEY}\r\n"],
)
def test_a_key_is_told_by_its_hash_wherever_it_stands(headers: str) -> None:
    found = who({"api_key": True}, headers=headers)
    assert found == who({"api_key": True}, headers=f"api-key: {KEY}\r\n")
    prefix, _, digits = found.partition("-")
    assert (prefix, len(digits), set(digits) <= set("0123456789abcdef")) == ("key", 8, True)
    assert found != who({"api_key": True}, headers=headers, salt="salt"), "it depends on the salt"
    assert found != who({"api_key": True}, headers=headers.replace("secret", "secreT"))


@given(st.text("abcXYZ0123-_.~+/=", min_size=16, max_size=200), st.sampled_from(["Bearer ", "Basic ", ""]))
def test_no_part_of_a_key_is_in_its_name(key: str, scheme: str) -> None:
    found = who({"api_key": True}, headers=f"authorization: {scheme}{key}\r\n")
    assert key.strip() not in found
    assert len(found) == 12


def test_what_names_a_person_can_be_hashed_and_a_hash_be_given_a_name() -> None:
    rule = {"body": "user", "hashed": True}
    found = who(rule, body={"user": "ann@example.org"})
    assert found.startswith("id-")
    assert "ann" not in found
    assert who(rule, body={"user": "ann@example.org"}, names={found: "ann's team"}) == "ann's team"


@given(st.one_of(st.text(max_size=300), st.binary(max_size=300).map(lambda b: b.decode("latin-1"))))
def test_names_are_visible_and_short_and_stay_apart(value: str) -> None:
    found = who({"body": "user"}, body={"user": value})
    assert found.isprintable()
    assert 1 <= len(found) <= 64
    if len(value.strip()) > 64:
        assert found != who({"body": "user"}, body={"user": value + "x"})


def test_a_headers_bytes_may_be_anything() -> None:
    assert who({"header": "x-team"}, headers="x-team: caf\xc3\xa9\r\n") == "café"
    assert who({"header": "x-team"}, headers="x-team: \xff\r\n") == "\ufffd"


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        ({}, "tenants.rules[0]"),
        ({"header": "a", "body": "b"}, "tenants.rules[0]"),
        ({"header": "no good"}, "tenants.rules[0].header"),
        ({"body": "a..b"}, "tenants.rules[0].body"),
        ({"path": "("}, "tenants.rules[0].path"),
        ({"path": "/x"}, "tenants.rules[0].path"),
    ],
)
def test_a_rule_that_cannot_be_is_named(rule: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as failure:
        TenantOptions(rules=(TenantRule(**rule),))
    assert failure.value.place == place


def test_all_mistakes_of_the_table_are_reported_at_once() -> None:
    rules = TenantRule(header="no good", body="a..b"), TenantRule(path="(")
    with pytest.raises(ConfigError) as failure:
        TenantOptions(rules=rules, names={"key-1": ""}, salt="")
    assert [one.place for one in failure.value.all_errors()] == [
        "tenants.rules[0]",
        "tenants.rules[0].header",
        "tenants.rules[0].body",
        "tenants.rules[1].path",
        "tenants.salt",
        "tenants.names.key-1",
    ]


def test_names_and_salt_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.names\.key-1"):
        TenantOptions(names={"key-1": "a\nb"})
    with pytest.raises(ConfigError, match=r"tenants\.salt"):
        TenantOptions(salt="")


@pytest.mark.parametrize("key", [KEY, f"Bearer {KEY}", "hf_QwErTyUiOpAsDfGhJkLz1xCvBnMqWeRtYu"])
def test_a_key_where_a_name_belongs_is_shown_as_a_key(key: str) -> None:
    rule = {"header": "X-Team"}
    found = who(rule, headers=f"x-team: {key}\r\n")
    assert re.fullmatch(r"key-[0-9a-f]{8}", found)
    assert found != who(rule, headers=f"x-team: {key}2\r\n")
    assert found == who({"body": "user"}, body={"user": key})
    assert who(rule, headers=f"x-team: {key}\r\n", names={key: "acme"}) == "acme"


names = st.sampled_from([f"n{i}" for i in range(12)])


@given(st.lists(st.tuples(names, names, st.sampled_from([None, "a", "b"])), max_size=200))
def test_values_are_bounded_and_stable(query: list[tuple[str, str, str | None]]) -> None:
    labels = Labels(tenants_max=3, models_max=4, series_max=6)
    first: dict[tuple[str, str, str | None], tuple[str, str, str]] = {}
    for name, model, arm in query:
        tenant = labels.tenant(name)
        answer = labels.fold(tenant, model, arm)
        assert answer[0] in (name, OTHER)
        assert answer[1] in (model, OTHER)
        assert answer[2] == (arm or "")
        assert first.setdefault((name, model, arm), answer) == answer
    given_out = set(first.values())
    assert len({t for t, _, _ in given_out}) <= 3 + 1
    assert len({m for _, m, _ in given_out}) <= 4 + 1
    # Each tenant (and `other`) may have its series with the model `other` on top, in each arm.
    assert len(given_out) <= 6 + 4 * 3


def test_whoever_the_gateway_does_not_know_takes_no_place() -> None:
    labels = Labels(tenants_max=1, models_max=1, series_max=9)
    assert labels.tenant("guess", trusted=False) == OTHER
    assert labels.tenant("real") == "real"
    assert labels.tenant("real", trusted=False) == "real"
    assert labels.overflow["tenant"] == 0


def test_a_model_takes_a_place_only_with_an_accepted_request() -> None:
    labels = Labels(tenants_max=1, models_max=1, series_max=9)
    assert labels.fold("default", "guess", trusted=False) == ("default", OTHER, "")
    assert labels.fold("default", None, trusted=False) == ("default", "unknown", "")
    assert labels.fold("default", "real") == ("default", "real", "")
    assert labels.fold("default", "real", trusted=False) == ("default", "real", "")
    assert labels.overflow == {"tenant": 0, "model": 0, "series": 0}


def test_requests_that_a_guardrail_refused_give_places_to_a_few_names() -> None:
    labels = Labels(tenants_max=99, models_max=99, series_max=99)
    assert labels.tenant("acme", trusted=False, refused=True) == "acme"
    labels.model("known")
    assert labels.fold("acme", "known", "guarded", trusted=False, refused=True) == (
        "acme",
        "known",
        "guarded",
    )
    names = [f"m-{i}" for i in range(REFUSED_PLACES_MAX)]
    folded = [labels.fold("acme", name, trusted=False, refused=True)[1] for name in names]
    assert folded == [*names[:-1], OTHER], "one place has the tenant, and a known model needs none"
    assert labels.tenant("new", trusted=False, refused=True) == OTHER
    assert labels.fold("acme", names[0], trusted=False) == ("acme", names[0], "")


def test_nobody_takes_the_name_that_stands_for_a_key() -> None:
    """A header with the shown hash of somebody's key would count as that key."""
    shown = who({"api_key": True}, headers="Authorization: Bearer sk-secret-of-somebody-1\r\n")
    assert re.fullmatch("key-[0-9a-f]{8}", shown)
    rule = {"header": "X-Team"}
    cut = who(rule, headers=f"X-Team: {'n' * 100}\r\n")
    hashed = who({"header": "X-Team", "hashed": True}, headers="X-Team: acme\r\n")
    for name in (shown, cut, hashed):
        assert who(rule, headers=f"X-Team: {name}\r\n") != name
        assert who({"body": "user"}, body={"user": name}) != name
        # Nor the name that the operator gave to the hash.
        assert who(rule, headers=f"X-Team: {name}\r\n", names={name: "acme"}) != "acme"


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ("X-Team: acme\r\nx-team: acme\r\n", "acme"),
        ("X-Team: acme\r\nx-team: other-team\r\n", "default"),
        ("X-Team: acme\r\nX_Team: other-team\r\n", "acme"),
        ("X-Team: acme\r\nConnection: x-team\r\n", "default"),
        ("X-Team: acme\r\nConnection: keep-alive, X-TEAM\r\n", "default"),
    ],
)
def test_a_tenants_header_counts_as_it_is_forwarded(headers: str, tenant: str) -> None:
    """RFC 9110 7.6.1: what Connection names ends at this hop; 5.3: lines that differ are ambiguous."""
    assert who({"header": "X-Team"}, headers=headers) == tenant


def test_a_models_name_is_visible_and_short() -> None:
    labels = Labels(1, 9, 9)
    assert labels.fold("t", "a\nb")[1] == "a_b"
    assert len(labels.fold("t", "m" * 10_000)[1]) == 128


NAMES = 10_000
KNOWN_MAX = 1_000

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CLOSING = json.dumps({"outcome": "complete"}).encode()


@pytest.mark.once
def test_ten_thousand_tenants_are_a_thousand_and_the_rest() -> None:
    tally = ExchangePipeline(MeterOptions(), ManualClock())
    hello = Hello(relay="r", pid=1, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)
    assembler = Assembler(hello, tally)
    for seq in range(1, NAMES + 1):
        name = b"tenant-%d" % seq + b"x" * (seq % 3_000)  # in length without end, too
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
        request += b"x-llm-d-inference-fairness-id: " + name + b"\r\ncontent-length: 0\r\n\r\n"
        assembler.digest(
            [
                (FrameKind.SENT, seq, seq, seq + 1, request),
                (FrameKind.RESPONSE_HEAD, seq, seq + 2, 0, HEAD),
                (FrameKind.RESPONSE_DATA, seq, seq + 3, 0, b"data: [DONE]\n\n"),
                (FrameKind.RESPONSE_END, seq, seq + 4, 0, b""),
                (FrameKind.CLOSE, seq, seq + 5, 0, CLOSING),
            ]
        )
    assert tally.errors == {}
    assert tally.labels.overflow["tenant"] == NAMES - KNOWN_MAX
    body, _ = metrics_of(tally).render("")
    tenants = set(re.findall(rb'tenant="([^"]*)"', body))
    assert len(tenants - {b"default"}) == KNOWN_MAX + 1
    assert b"other" in tenants
    assert max(map(len, tenants)) < 300


def test_overflow_is_counted_by_label() -> None:
    labels = Labels(tenants_max=1, models_max=2, series_max=100)
    assert [labels.tenant(name) for name in ("a", "b", "a", "c")] == ["a", OTHER, "a", OTHER]
    assert labels.fold("a", "m1") == ("a", "m1", "")
    assert labels.fold("a", "m2") == ("a", "m2", "")
    assert labels.fold("a", "m3") == ("a", OTHER, "")
    assert labels.overflow == {"tenant": 2, "model": 1, "series": 0}
