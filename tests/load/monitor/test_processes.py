"""What is read of /proc: against files of known content, and against real processes that know the truth."""

import os
import socket
import sys
from pathlib import Path

import pytest

from llmtap.load.monitor.system import (
    Group,
    ObservedProcess,
    groups_of,
    is_loopback,
    listeners,
    read_host,
    read_processes,
)
from tests.support.busy_child import BusyChild, busy_child

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def proc_of(root: Path, **files: str) -> Path:
    """A /proc with these files; `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/").lstrip("_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def stat_of(name: str, parent: int, ticks: tuple[int, int, int, int], pages: int) -> str:
    user, system, ended_user, ended_system = ticks
    return (
        f"7 ({name}) S {parent} 7 7 0 -1 4194304 1 0 0 0 {user} {system} {ended_user} {ended_system}"
        f" 20 0 3 0 77 999999 {pages} 18446744073709551615 1 1 0 0 0\n"
    )


@pytest.mark.parametrize("name", ["python", "a b", "x) S 1 (y", "", "ä"])
def test_a_process_whatever_its_name(tmp_path: Path, name: str) -> None:
    proc = proc_of(tmp_path, _7__stat=stat_of(name, 3, (10, 20, 300, 4_000), 5), self="")
    assert read_processes(proc) == {7: ObservedProcess(7, 3, name, 4_330 * TICK_NS, 5 * PAGE)}


def test_a_process_that_has_gone_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "8").mkdir()
    assert read_processes(proc_of(tmp_path, _9__stat="", _10__stat="10 (x) S 1")) == {}


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "used"),
    [(MEMINFO, 600 * 1024), ("MemTotal: 1000 kB\n", None), ("MemTotal: x\n", None), (None, None)],
)
def test_the_host(tmp_path: Path, meminfo: str | None, used: int | None) -> None:
    proc = proc_of(tmp_path, stat="cpu  1 2 4 100 50 8 16 32 7 7\ncpu0 1 2 4 100 50 8 16 32 7 7\n")
    if meminfo is not None:
        proc_of(tmp_path, meminfo=meminfo)
    host = read_host(proc)
    # Time of guests is in user's already; waiting for a disk is idle; what was stolen is neither.
    assert (host.busy_ns, host.stolen_ns, host.total_ns) == (31 * TICK_NS, 32 * TICK_NS, 213 * TICK_NS)
    assert host.memory_used_bytes == used


def test_another_kernel_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="first line"):
        read_host(proc_of(tmp_path, stat="processes 3\n"))


def test_the_kernel_s_own_figures_of_this_host() -> None:
    one, two = read_host(), read_host()
    assert 0 < one.busy_ns <= two.busy_ns < two.total_ns
    assert one.memory_used_bytes is not None and one.memory_used_bytes > 0


def tree(*links: tuple[int, int]) -> dict[int, ObservedProcess]:
    return {pid: ObservedProcess(pid, parent, f"p{pid}", pid * 100, pid) for pid, parent in links}


@pytest.mark.parametrize(
    ("links", "roots", "expected"),
    [
        # Descendants go with their root; the others belong to nobody.
        ([(1, 0), (2, 1), (3, 2), (9, 1)], {2: "sender"}, {"sender": {2, 3}}),
        # The nearest root wins: a server that the sender has started, and one below it again.
        (
            [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)],
            {2: "sender", 3: "server", 5: "sender"},
            {"sender": {2, 5}, "server": {3, 4}},
        ),
        # Several roots of one side, one inside the other: once each.
        ([(2, 1), (3, 2), (4, 3)], {2: "sender", 3: "sender"}, {"sender": {2, 3, 4}}),
        # A root or a parent that has gone; a parent of itself; a ring, as a torn reading may show.
        ([(2, 1)], {77: "server"}, {"server": set()}),
        ([(2, 55), (3, 3)], {4: "sender"}, {"sender": set()}),
        ([(2, 3), (3, 2), (4, 2)], {9: "sender"}, {"sender": set()}),
        ([(2, 3), (3, 2), (4, 2)], {3: "sender"}, {"sender": {2, 3, 4}}),
        ([], {}, {}),
    ],
)
def test_each_process_belongs_to_its_nearest_root(
    links: list[tuple[int, int]], roots: dict[int, str], expected: dict[str, set[int]]
) -> None:
    groups = groups_of(tree(*links), roots)
    assert {name: {process.pid for process in group.processes} for name, group in groups.items()} == expected
    for group in groups.values():
        assert group.cpu_ns == sum(process.pid * 100 for process in group.processes)
        assert group.rss_bytes == sum(process.pid for process in group.processes)


def test_a_deep_tree_is_no_harm() -> None:
    deep = tree(*((pid, pid - 1) for pid in range(2, 5_000)))
    assert len(groups_of(deep, {2: "sender"})["sender"].processes) == 4_998


def cpu_ns(child: BusyChild) -> int:
    return groups_of(read_processes(), {child.pid: "it"})["it"].cpu_ns


def test_cpu_time_is_what_the_process_says_itself() -> None:
    with busy_child() as child:
        before_ns = child.burn(0.3)
        read_ns = cpu_ns(child)
        after_ns = child.used_ns()
    # Times of user and system come in whole ticks each.
    assert before_ns - 2 * TICK_NS <= read_ns <= after_ns + 2 * TICK_NS


def test_a_child_that_ended_keeps_its_time_in_the_group() -> None:
    with busy_child() as child:
        own_ns = child.used_ns()
        before_ns = cpu_ns(child)
        own_after_ns = child.breed(0.2)
        grown_ns = cpu_ns(child) - before_ns
    assert own_after_ns - own_ns < 200_000_000 < grown_ns + 4 * TICK_NS


def test_memory_is_the_process_s_own() -> None:
    me = read_processes()[os.getpid()]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    assert me.rss_bytes == pytest.approx(resident, rel=0.2)
    assert me.parent == os.getppid()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("everywhere", [False, True])
def test_who_listens_on_loopback_is_found(family: socket.AddressFamily, everywhere: bool) -> None:
    any_, own = ("0.0.0.0", "127.0.0.1") if family == socket.AF_INET else ("::", "::1")
    try:
        server = socket.create_server((any_ if everywhere else own, 0), family=family)
    except OSError as exc:
        pytest.skip(f"this host has no {family.name}: {exc}")
    with server:
        port = server.getsockname()[1]
        for host in (own, "localhost"):
            assert listeners(host, port) == ([os.getpid()], None)
    assert listeners(own, port) == ([], f"nobody listens on port {port}")


def test_a_connection_to_the_port_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        client = socket.create_connection(address)
        accepted, _ = server.accept()
    with client, accepted:
        assert listeners(*address) == ([], f"nobody listens on port {address[1]}")


TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0\n"
    "   1: 0200A8C0:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1 0\n"
    "   2: 0100007F:1F90 0100007F:C000 01 00000000:00000000 00:00000000 00000000     0        0 333 1 0\n"
)
TCP6 = (
    "  sl  local_address                         remote_address                        st\n"
    "   0: 0000000000000000FFFF00000100007F:1F90 00000000000000000000000000000000:0 0A 0:0 0:0 0 0 0 444 1\n"
    "   1: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0 0A 0:0 0:0 0 0 0 555 1\n"
)


@pytest.mark.skipif(sys.byteorder != "little", reason="as a little-endian kernel prints addresses")
@pytest.mark.parametrize(
    ("host", "holders"),
    [("127.0.0.1", [11, 44]), ("::1", [55]), ("[::1]", [55]), ("localhost", [11, 44, 55]), ("127.0.0.2", [])],
)
def test_only_sockets_that_the_target_reaches(tmp_path: Path, host: str, holders: list[int]) -> None:
    proc = proc_of(tmp_path, net__tcp=TCP, net__tcp6=TCP6)
    for pid, inode in ((11, 111), (22, 222), (33, 333), (44, 444), (55, 555)):
        folder = tmp_path / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder / "0").symlink_to("/dev/null")
        (folder / "5").symlink_to(f"socket:[{inode}]")
    (tmp_path / "66").mkdir()  # another user's: no list of its files
    found, why = listeners(host, 0x1F90, proc)
    assert sorted(found) == holders
    assert (why is None) == bool(holders)


@pytest.mark.skipif(sys.byteorder != "little", reason="as a little-endian kernel prints addresses")
def test_a_listener_that_is_hidden_is_told_from_none(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, net__tcp=TCP)
    assert listeners("127.0.0.1", 0x1F90, proc) == ([], "who listens on port 8080 is hidden from this user")
    assert listeners("127.0.0.1", 81, proc) == ([], "nobody listens on port 81")


@pytest.mark.parametrize(
    ("host", "is_"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("10.0.0.1", False), ("example.com", False), ("", False), ("localhost.example.com", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, is_: bool) -> None:
    assert is_loopback(host) is is_
    if not is_:
        assert listeners(host, 80) == ([], f"{host} is not a loopback address")


def test_an_empty_group_has_used_nothing() -> None:
    assert (Group(()).cpu_ns, Group(()).rss_bytes) == (0, 0)
