"""Limits of this host: what a load may not need, and what a request that ran into one ends as."""

import errno
import os
import re
import socket

import pytest

from llmtap.errors import ConfigError
from llmtap.exchange.outcome import Outcome
from llmtap.load import host_limits
from llmtap.load.host_limits import HOST_LIMITS, check_connections, host_limit
from tests.support.servers.loading import sender_to
from tests.support.servers.peer import play


@pytest.fixture(autouse=True)
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "files_max", lambda: 248)
    monkeypatch.setattr(host_limits, "local_ports", lambda: 500)


@pytest.mark.parametrize(
    ("certain", "processes", "place"),
    [(201, 1, "open files"), (401, 2, "open files"), (501, 3, "local ports")],
)
def test_a_load_beyond_a_limit_is_refused_with_the_limit_and_the_remedy(
    certain: int, processes: int, place: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(place)) as refused:
        check_connections(certain, certain, processes)
    assert refused.value.place == place and refused.value.hint


def test_a_load_that_may_reach_a_limit_gets_a_note() -> None:
    assert check_connections(200, 200, 1) is None
    note = check_connections(1, 201, 1)
    assert note is not None and "248 open files" in note and "ulimit -n" in note
    assert "500 local ports" in (check_connections(1, 501, 3) or "")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
def test_each_limit_of_the_host_has_a_text_and_a_remedy(number: int) -> None:
    assert host_limit(OSError(number, os.strerror(number))) in HOST_LIMITS


def test_a_failure_of_the_server_is_none_of_the_host() -> None:
    assert host_limit(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None
    assert host_limit(TimeoutError()) is None


def test_a_request_without_a_file_left_ends_as_ours_and_the_next_is_sent() -> None:
    async def work() -> list[tuple[Outcome, str | None]]:
        server = socket.create_server(("127.0.0.1", 0))  # its backlog accepts, and nobody answers
        async with sender_to(f"http://127.0.0.1:{server.getsockname()[1]}") as sending:
            sending.sender._connections_max = 2
            calls = [sending.send(row=row) for row in range(3)]
            await sending.end_of(calls[2])
            for call in calls[:2]:
                call.cancel("enough")
            over = [sending.of(call) for call in calls]
        server.close()
        return [(x.outcome, x.error) for x in over]

    first, second, third = play(work(), 60)
    assert first[0] is second[0] is Outcome.CLIENT_CANCELLED
    assert third == (Outcome.TAP_ERROR, host_limit(OSError(errno.EMFILE, "")))
