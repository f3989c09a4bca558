"""What one supervisor leaves to the next, and what happens when there is no next."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator

import msgspec
import pytest

from llmtap.config import load_settings
from llmtap.errors import ConfigError
from llmtap.supervisor import handover as module
from llmtap.supervisor.child import Child, ChildState
from llmtap.supervisor.handover import (
    Handover,
    block_signals,
    replace_process,
    take_handover,
    try_out,
    unblock_signals,
)
from llmtap.supervisor.ports import PortsState
from llmtap.supervisor.run import ProxyRun
from tests.support.waiting import PATIENCE_S

ARMS = '[{"name": "a"}, {"name": "b", "headers": {"x-b": "1"}}]'


@pytest.fixture
def left() -> Iterator[Handover]:
    """Of this process: a port of clients, an admin port, and a relay."""
    settings = load_settings(
        None, {}, {"relay.upstream": "http://127.0.0.1:9", "experiment.arms": ARMS, "experiment.until": "1h"}
    )
    run = ProxyRun.begin(settings)
    clients, admin, stdin = (socket.create_server(("127.0.0.1", 0)) for _ in range(3))
    with clients, admin, stdin:
        yield Handover(
            pid=os.getpid(),
            run=run,
            tap_path="/nowhere/tap.sock",
            drain_s=3.0,
            ports=PortsState(
                clients=[clients.fileno()], admin=admin.fileno(), listen_at="127.0.0.1:0", admin_at=None
            ),
            children=[
                ChildState(
                    kind="relay", name="r.0.1", index=0, pid=1, stdin=stdin.fileno(), ready=True, until_s=None
                )
            ],
        )
    os.rmdir(run.folder)


def fds_of(left: Handover) -> list[int]:
    return [left.ports.admin, *left.ports.clients, *(child.stdin for child in left.children)]


def put(data: bytes) -> dict[str, str]:
    """An environment that names a file with it."""
    fd = os.memfd_create("test")
    os.write(fd, data)
    return {"LLMTAP_HANDOVER": str(fd), "HOME": "/x"}


def test_what_is_left_is_found_again_whole(left: Handover) -> None:
    fd = module._write_handover(left)
    environ = {"LLMTAP_HANDOVER": str(fd), "HOME": "/x"}
    assert left.run.experiment is not None
    assert take_handover(environ, os.getpid()) == left
    assert environ == {"HOME": "/x"}, "no child takes it for its own"
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.mark.parametrize("data", [b'{"format": 99}', b"[]", b"{", b'{"format": 1, "pid": "x"}'])
def test_a_format_that_nobody_knows_is_named(data: bytes) -> None:
    with pytest.raises(ConfigError, match="LLMTAP_HANDOVER"):
        take_handover(put(data), os.getpid())


def test_a_program_that_cannot_be_run_changes_nothing(
    left: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[bool]] = []

    def fails(path: str, argv: list[str], environ: dict[str, str]) -> None:
        seen.append([os.get_inheritable(fd) for fd in (*fds_of(left), int(environ["LLMTAP_HANDOVER"]))])
        raise FileNotFoundError(2, "gone", path)

    monkeypatch.setattr(os, "execve", fails)
    with pytest.raises(OSError, match="gone"):
        replace_process(left, ["/nowhere/python", "-m", "llmtap.cli"])
    assert seen == [[True] * 4]
    assert not any(os.get_inheritable(fd) for fd in fds_of(left))


def test_signals_wait_while_they_are_held() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        block_signals()
        signal.raise_signal(signal.SIGUSR2)  # to this thread: others of the tests' do not hold it back
        assert signal.SIGUSR2 in signal.sigpending()
        assert came == []
        unblock_signals()
        assert came == [signal.SIGUSR2]
    finally:
        unblock_signals()
        signal.signal(signal.SIGUSR2, before)


def test_a_program_is_tried_and_its_complaint_told(left: Handover) -> None:
    result = "import os, sys; fd = int(os.environ['LLMTAP_HANDOVER']); sys.exit(os.fstat(fd).st_size == 0)"
    assert asyncio.run(try_out(left, [sys.executable, "-c", result])) is None
    complains = [sys.executable, "-c", "import sys; sys.exit('no such key')"]
    assert asyncio.run(try_out(left, complains)) == "no such key"
    silent = asyncio.run(try_out(left, [sys.executable, "-c", "raise SystemExit(7)"]))
    assert silent is not None and "status 7" in silent
    assert "cannot be run" in str(asyncio.run(try_out(left, ["/nowhere/python"])))


def test_a_new_run_begins_and_an_old_one_goes_on_where_the_settings_are_the_same(left: Handover) -> None:
    run = msgspec.structs.replace(left.run)
    same = {"relay.upstream": "http://127.0.0.1:9", "experiment.arms": ARMS, "experiment.until": "1h"}
    run.follow(load_settings(None, {}, same | {"relay.workers": 3}))
    assert run == left.run
    run.follow(load_settings(None, {}, same | {"experiment.until": "2h"}))
    assert run.experiment != left.run.experiment
    assert (run.capture_id, run.capture_salt) == (left.run.capture_id, left.run.capture_salt)
    run.follow(load_settings(None, {}, same | {"capture.to": "elsewhere"}))
    assert run.capture_id != left.run.capture_id
    assert run.capture_salt != left.run.capture_salt


async def test_an_adopted_child_is_waited_for_told_and_ended() -> None:
    read, write = os.pipe()
    script = "import sys; sys.exit(int(sys.stdin.readline()))"
    for ending in ("told", "killed"):
        process = os.posix_spawn(  # noqa: ASYNC221
            sys.executable,
            [sys.executable, "-c", script],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)],
        )
        handed = ChildState(
            kind="meter", name="m", index=0, pid=process, stdin=os.dup(write), ready=True, until_s=None
        )
        child = Child.adopt(handed)
        assert child.to_state() == handed
        if ending == "told":
            child.write_line(b"5")
            assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 5
        else:
            await child.end_within(0.0)
            assert await child.wait() == -signal.SIGKILL
        await child.wait_and_close()
        child.signal(signal.SIGTERM)  # nobody's number any more: nothing is sent
    os.close(read)
    os.close(write)
    buried = ChildState(
        kind="relay", name="r", index=1, pid=process, stdin=os.dup(0), ready=True, until_s=None
    )
    child = Child.adopt(buried)
    assert await child.wait() == 0, "no child of ours any more"
    await child.wait_and_close()
