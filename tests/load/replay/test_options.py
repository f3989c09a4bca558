"""Options are checked where they are told: each error names its option, and shows no key."""

from pathlib import Path
from typing import Any

import pytest
import trustme

from llmtap.errors import ConfigError
from llmtap.load.replay.options import USER_AGENT, ReplayOptions, read_headers
from llmtap.units import NS_PER_S, Duration

SECOND = Duration(NS_PER_S)
NEVER_SHOWN = "sk-very-secret"


def options(**more: Any) -> ReplayOptions:
    given: dict[str, Any] = {
        "target": "http://h:1", "timeout": SECOND, "connect_timeout": SECOND, "retry_wait": SECOND, **more,
    }  # fmt: skip
    return ReplayOptions(**given)


def place_of(**more: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        options(**more)
    assert NEVER_SHOWN not in str(refused.value)
    return refused.value.place


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"timeout": Duration(0)}, "--timeout"),
        ({"connect_timeout": Duration(0)}, "--connect-timeout"),
        ({"duration": Duration(0)}, "--duration"),
        ({"drain": Duration(-1)}, "--drain"),
        ({"retry_wait": Duration(-1)}, "--retry-wait"),
        ({"tenant_header": "X Y"}, "--tenant-header"),
        ({"tenant_header": ""}, "--tenant-header"),
        ({"tenant_header": "Host"}, "--tenant-header"),
        ({"tenant_header": "X-Täter"}, "--tenant-header"),
        ({"headers": [("X Y", NEVER_SHOWN)]}, "--header"),
        ({"headers": [("X", f"{NEVER_SHOWN}\r\nY: 1")]}, "--header"),
        ({"scrape": "foo"}, "--metrics"),
        ({"scrape": ""}, "--metrics"),
        ({"scrape": "h:8000/metrics"}, "--metrics"),
        ({"scrape": "http://"}, "--metrics"),
        ({"scrape": "http://h:eighty/metrics"}, "--metrics"),
        ({"scrape": "grpc://h:1/metrics"}, "--metrics"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(more: dict[str, Any], place: str) -> None:
    assert place_of(**more) == place


@pytest.mark.parametrize(
    "more",
    [
        {"drain": Duration(0)}, {"retry_wait": Duration(0)}, {"duration": None}, {"scrape": "none"},
        {"scrape": "https://h/metrics?x=1"}, {"scrape": None}, {"tenant_header": "X-Tenant_1!"},
        {"headers": [("Authorization", f"Bearer {NEVER_SHOWN}")]},
    ],
)  # fmt: skip
def test_what_can_be_is_taken(more: dict[str, Any]) -> None:
    options(**more)


def test_a_ca_is_a_file_of_certificates(tmp_path: Path) -> None:
    nonsense, key, good = (tmp_path / name for name in ("nonsense", "key", "ca"))
    nonsense.write_text("not a certificate")
    ca = trustme.CA()
    ca.private_key_pem.write_to_path(key)
    ca.cert_pem.write_to_path(good)
    for place, said in (
        (tmp_path / "none", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (nonsense, "holds no certificate in PEM"),
        (key, "holds no certificate in PEM"),
    ):
        with pytest.raises(ConfigError) as refused:
            options(ca=str(place))  # also where the target is http://
        assert (refused.value.place, refused.value.problem) == ("--ca", f"{place} {said}")
    trusting = options(ca=str(good)).tls()
    assert trusting is not None and len(trusting.get_ca_certs()) == 1
    assert options().tls() is None
    anybody = options(insecure=True).tls()
    assert anybody is not None and not anybody.check_hostname


def test_tenants_that_would_break_out_of_their_field_are_refused() -> None:
    options().check_tenants(["a\r\nHost: b"])  # which nobody sends
    options(tenant_header="X-Tenant").check_tenants(["a", "", "ä b", "a"])
    with pytest.raises(ConfigError) as refused:
        options(tenant_header="X-Tenant").check_tenants(["a", "a\r\nHost: b"])
    assert refused.value.place == "--tenant-header"


@pytest.mark.parametrize(
    ("line", "place"),
    [(NEVER_SHOWN, "--header"), (f": {NEVER_SHOWN}", "--header"), (f"X Y: {NEVER_SHOWN}", "--header"),
     (f"Host: {NEVER_SHOWN}", "--header")],
)  # fmt: skip
def test_headers_of_the_command_line_and_of_a_file(line: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_headers([line], None, None)
    assert refused.value.place == place
    assert NEVER_SHOWN not in str(refused.value)
    file = tmp_path / "fields"
    file.write_text(f"X-Good: 1\n\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        read_headers([], file, None)
    assert refused.value.place == f"{place}-file"
    assert NEVER_SHOWN not in str(refused.value)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f"{NEVER_SHOWN}\n")
    assert read_headers([], None, "SOME_KEY") == [("Authorization", f"Bearer {NEVER_SHOWN}")]
    assert read_headers(["authorization: mine"], None, "SOME_KEY") == [("authorization", "mine")]
    monkeypatch.setenv("SOME_KEY", f"{NEVER_SHOWN}\nX: y")
    with pytest.raises(ConfigError) as refused:
        read_headers([], None, "SOME_KEY")
    assert refused.value.place == "--api-key-env"
    assert NEVER_SHOWN not in str(refused.value)


def test_who_asks_beside_the_load_has_a_name() -> None:
    name, slash, version = USER_AGENT.partition("/")
    assert (name, slash) == ("llmtap-replay", "/")
    assert version[0].isdigit()
