"""Which commands last, by a table."""

import pytest

from tests.docs.servers_named import lasting


@pytest.mark.parametrize(
    ("command", "ports", "url"),
    [
        ("llmtap proxy --upstream URL", {8080, 9464}, "http://127.0.0.1:9464/readyz"),
        (".venv/bin/llmtap proxy --listen 0.0.0.0:80 --admin 127.0.0.1:81  # on", {80, 81},
         "http://127.0.0.1:81/readyz"),
        ("LLMTAP_METER_WINDOW=5m llmtap proxy", {8080, 9464}, "http://127.0.0.1:9464/readyz"),
        ("llmtap meter --listen-socket a.sock", {9464}, "http://127.0.0.1:9464/healthz"),
        ("llmtap sim serve", {8000}, "http://127.0.0.1:8000/health"),
        ("llmtap sim serve --listen 127.0.0.1:8123 --grpc 127.0.0.1:8001", {8123, 8001},
         "http://127.0.0.1:8123/health"),
        ("uvicorn app:app --port 8005", {8005}, ""),
    ],
)  # fmt: skip
def test_servers_are_known_with_their_ports(command: str, ports: set[int], url: str) -> None:
    found = lasting(command)
    assert found is not None
    assert (found.ports, found.url, found.watched) == (ports, url, False)
    assert found.url or found.says


@pytest.mark.parametrize("command", ["llmtap demo --keep", "curl -sN localhost:9464/api/v1/live?tenant=acme"])
def test_what_one_watches_is_seen_by_its_output(command: str) -> None:
    found = lasting(command)
    assert found is not None
    assert found.watched
    assert found.says


@pytest.mark.parametrize(
    "command",
    ["llmtap proxy --check", "llmtap proxy --keys", "llmtap sim run chat", "llmtap top",
     "curl -s localhost:9464/metrics", "echo llmtap proxy", "llmtap demo", "A=1"],
)  # fmt: skip
def test_others_end_by_themselves(command: str) -> None:
    assert lasting(command) is None
