"""What holds for all tests."""

import fcntl
import gc
import inspect
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.servers.peer import play

# How long an example takes says something about the machine, and here nobody asks.
settings.register_profile("llmtap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("llmtap")

# A shell starts what runs in its background with Ctrl-C ignored, and so would be all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots", metavar="DIR", help="where test_pictures.py puts what it makes: docs/images"
    )
    parser.addoption(
        "--rewrite-golden", action="store_true", help="rewrite the files in tests/golden/expected"
    )


LONG_FIRST = (
    "tests/proxy/",
    "tests/bench/",
    "tests/supervisor/",
    "tests/cli/",
    "tests/sim/sweep/",
)
"""Folders with long tests: started first, so that no process ends long after the others."""
NO_BROWSER = "there is no chromium"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: one more than CPUs, because many tests wait."""
    return 1 + len(os.sched_getaffinity(0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the objects of all test modules from garbage collection, which would visit them repeatedly."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(mark.kwargs.get("reason") == NO_BROWSER for mark in item.iter_markers("skipif")):
            item.add_marker("browser")
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function: on a loop of its own, within a time limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    play(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module", autouse=True)
def one_ray_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep tests of other processes from starting Ray: on two CPUs, two that start together time out."""
    items = (item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    if not any(item.get_closest_marker("ray") for item in items):
        yield
        return
    with (Path(tempfile.gettempdir()) / "llmtap-tests-ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
