"""Addresses that lead back to llmtap, or that were exchanged."""

import pytest

from llmtap.config import load_settings
from llmtap.supervisor.checks import problems_of, warnings_of
from llmtap.supervisor.watching import watch_problems


def places(**relay: str) -> list[str]:
    flags = {"meter.admin": "127.0.0.1:9464"} | {f"relay.{name}": value for name, value in relay.items()}
    return [problem.place for problem in problems_of(load_settings(None, {}, flags))]


@pytest.mark.parametrize(
    ("listen", "upstream", "own"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080", True),
        ("127.0.0.1:8080", "http://localhost:8080/v1", True),
        ("0.0.0.0:8080", "http://localhost:8080", True),
        ("127.0.0.1:8080", "http://127.0.0.1:9464", True),
        ("127.0.0.1:8080", "http://localhost:9464", True),
        ("127.0.0.1:8080", "http://127.0.0.1:8000", False),
        ("127.0.0.1:8080", "http://127.0.0.2:8080", False),
        ("0.0.0.0:8080", "http://gateway:8080", False),
    ],
)
def test_an_upstream_that_is_llmtap_itself_is_refused(listen: str, upstream: str, own: bool) -> None:
    assert places(listen=listen, upstream=upstream) == (["relay.upstream"] if own else [])


@pytest.mark.parametrize(
    ("pair", "wrong"),
    [
        ({"upstream": "http://engine"}, []),
        ({"upstream": "ftp://engine"}, ["pair.upstream"]),
        ({"upstream": "http://engine", "listen": "127.0.0.1:8080"}, ["pair.listen"]),
        ({"upstream": "http://engine", "listen": "127.0.0.1:9464"}, ["pair.listen"]),
        ({"upstream": "http://localhost:8081"}, ["pair.upstream"]),
        ({"upstream": "http://localhost:8080"}, ["pair.upstream"]),
        ({"back_ports": [8000]}, ["pair.back_ports"]),
    ],
)
def test_what_is_wrong_with_a_second_relay(pair: dict[str, object], wrong: list[str]) -> None:
    flags = {"relay.upstream": "http://gateway", **{f"pair.{key}": value for key, value in pair.items()}}
    assert [error.place for error in problems_of(load_settings(None, {}, flags))] == wrong


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"pair.back_ports": [8000]}, []),
        ({"pair.back_ports": [9000]}, ["pair.back_ports"]),
        ({"pair.back_ports": [4000, 8000]}, ["relay.upstream"]),
        ({"pair.back_ports": [4000, 8000], "relay.upstream": "http://gateway"}, []),
        ({"pair.back_ports": [4000, 8000], "relay.upstream": "ftp://gateway"}, ["relay.upstream"]),
        ({"pair.upstream": "http://engine"}, []),
        ({"pair.upstream": "http://localhost:8081"}, ["pair.upstream"]),
        ({"pair.upstream": "http://engine", "pair.back_ports": [8000]}, ["pair.back_ports"]),
    ],
)
def test_what_is_wrong_with_both_sides_of_a_watched_gateway(
    settings: dict[str, object], wrong: list[str]
) -> None:
    flags = {"watch.interfaces": ["lo"], "watch.ports": [4000, 8000], **settings}
    assert [error.place for error in watch_problems(load_settings(None, {}, flags))] == wrong


@pytest.mark.parametrize(
    ("listen", "admin", "warned"),
    [
        ("127.0.0.1:9464", "127.0.0.1:8080", True),
        ("127.0.0.1:8080", "127.0.0.1:9464", False),
        ("127.0.0.1:9464", "127.0.0.1:9465", False),
    ],
)
def test_ports_that_were_exchanged_are_a_warning(listen: str, admin: str, warned: bool) -> None:
    flags = {"relay.upstream": "http://gateway", "relay.listen": listen, "meter.admin": admin}
    settings = load_settings(None, {}, flags)
    assert not list(problems_of(settings))
    assert len(list(warnings_of(settings))) == warned
