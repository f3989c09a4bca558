"""The tests by name. A test's module is imported when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from llmtap.errors import ConfigError

if TYPE_CHECKING:
    from llmtap.bench.run.test import BenchTest

__all__ = ["TESTS", "test_named"]

TESTS: Final = {
    "ttft": ("5.1", "Time to First Token"),
    "throughput": ("5.2", "Output Token Throughput"),
    "tradeoff": ("5.3", "Throughput-Latency Tradeoff"),
    "itl": ("5.4", "Inter-Token Latency Distribution"),
    "capacity": ("5.5", "Concurrent Request Capacity"),
    "fairness": ("5.6", "Scheduling Fairness"),
    "prefix-cache": ("5.7", "Prefix Cache Effectiveness"),
    "memory-pressure": ("5.8", "Memory Pressure Behavior"),
    "long-context": ("5.9", "Long Context Scaling"),
    "guardrail-overhead": ("5.10", "Guardrail Overhead"),
}
"""Name: the draft's section and title. The module has the name, with `_`, and a `TEST`."""


def test_named(name: str) -> "BenchTest[Any]":
    """Raises ConfigError where there is no such test."""
    if name not in TESTS:
        raise ConfigError("TEST", f"no test is called {name!r}", f"one of {', '.join(TESTS)}, all")
    module = import_module(f"llmtap.bench.tests.{name.replace('-', '_')}")
    test: BenchTest[Any] = module.TEST
    return test
