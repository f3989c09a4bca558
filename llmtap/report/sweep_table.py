"""A sweep as a table for the terminal: a row for each run, and a column for each setting that varies.

Takes the public JSON of results, as `report/sweep.py` does. What does not vary is said below the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.report.sweep import Result, number, settings_of, values_text

__all__ = ["sweep_lines", "sweep_table"]

_Column = tuple[str, Callable[[Result], str]]

_UNSERVED: Final = {"upstream_error": "refused", "truncated": "given up"}
"""By outcome: no token of them left, or some."""
_SAID_OTHERWISE: Final = frozenset({"scheduler", "requests", "trace", "load", "objectives"})


def sweep_table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of texts."""
    columns: list[_Column] = [
        ("scheduler", lambda told: str(told["scheduler"])),
        ("requests", lambda told: f"{told['n']:,}"),
        *_varying(results),
        *_unserved(results),
        ("req/s", lambda told: _rate(told["throughput_rps"])),
        ("tok/s", lambda told: _rate(told["throughput_tps"])),
        *((f"{name} s", _seconds("latency", name)) for name in ("mean", "p50", "p95", "p99")),
        ("late", lambda told: _share(told["request_sla_violation"], 2)),
        ("slow", lambda told: _share(told["token_sla_violation"], 2)),
        ("busy", lambda told: _share(told["utilization"], 1)),
        ("batch", lambda told: _fixed(told["batch_mean"])),
        ("queue p50 s", _seconds("queueing", "p50")),
    ]
    if any("ttft" in told["metrics"] for told in results):
        columns += [
            ("TTFT p50 s", _seconds("metrics", "ttft", "p50")),
            ("TTFT p99 s", _seconds("metrics", "ttft", "p99")),
            ("TBT p99 s", _seconds("metrics", "itl", "p99")),
            ("idle p99 s", _seconds("metrics", "user_idle", "p99")),
            ("smooth tok/s", lambda told: _rate(_at(told, "smooth_goodput", "tokens_per_second"))),
        ]
    if any(told.get("goodput") for told in results):
        columns.append(("goodput req/s", lambda told: _rate(_at(told, "goodput", "requests_per_second"))))
    if any("capacity" in told for told in results):
        columns.append(("capacity req/s", _capacity))
    return [title for title, _ in columns], [[text(told) for _, text in columns] for told in results]


def sweep_lines(results: Sequence[Result]) -> Iterator[str]:
    """What the figures mean, and what is the same for all of them."""
    request_sla = _all(results, lambda told: f"{told['readings']['request_sla']:g}")
    token_sla = _all(results, lambda told: f"{told['readings']['token_sla'] * 1e3:g}")
    offered = _all(results, lambda told: f"{told['load']['offered_rps'] or 0:.4g}")
    line = f"late: outside the request SLA of {request_sla} s; slow: outside the token SLA of {token_sla} ms."
    yield line + (f" Offered: {offered} requests/s on average." if ", " not in offered else "")
    for allowed in _each(_at(told, "capacity", "allowed") for told in results):
        yield (
            f"capacity: the highest rate at which no more than {allowed:.3g} of the requests are late; "
            "0: there is none; no limit: all may come at once"
        )
    objectives = values_text((told.get("goodput") or {}).get("objectives") for told in results)
    if objectives:
        yield f"goodput: requests that met {objectives}"
    for reader in _each(_reader(told.get("smooth_goodput") or {}) for told in results):
        yield f"smooth: {reader}; idle: what such a reader waited with nothing to read"
    for fit, model in _each((told.get("fit"), told["model"]) for told in results if told.get("fit")):
        yield _fitted(fit, model)


def _unserved(results: Sequence[Result]) -> Iterator[_Column]:
    """How many a scheduler did not serve, or not to the end, where it did so to some."""
    for outcome, title in _UNSERVED.items():
        if any(told["outcomes"].get(outcome) for told in results):
            yield title, lambda told, outcome=outcome: f"{told['outcomes'].get(outcome, 0):,}"  # type: ignore[misc]


def _varying(results: Sequence[Result]) -> Iterator[_Column]:
    settings = [settings_of(told) for told in results]

    def varies(name: str) -> bool:
        return len({one.get(name) for one in settings} - {None}) > 1

    if varies("load"):
        yield "offered req/s", lambda told: _rate(told["load"]["offered_rps"])
    names = dict.fromkeys(name for one in settings for name in one)
    for name in names:
        if name not in _SAID_OTHERWISE and not name.startswith("model ") and varies(name):
            yield name, _setting(name)


def _setting(name: str) -> Callable[[Result], str]:
    return lambda told: values_text((settings_of(told).get(name),)) or "-"


def _reader(smooth: Mapping[str, Any]) -> str | None:
    if smooth.get("speed_tokens_per_second") is None:
        return None
    speed, alpha = number(smooth["speed_tokens_per_second"]), number(smooth["alpha"])
    return f"goodput for a reader of {speed} tokens/s, alpha {alpha}"


def _capacity(told: Result) -> str:
    found = told.get("capacity")
    return "no limit" if found and found["rps"] is None else _rate(_at(told, "capacity", "rps"))


def _fitted(fit: Mapping[str, Any], model: Mapping[str, float]) -> str:
    if "grid" in fit:
        return (
            f"model: alpha {model['alpha'] * 1e3:.4g} ms, beta {model['beta'] * 1e3:.4g} ms/token, "
            f"gamma {model['gamma']:.4g}; R^2 {fit['r2']:.5f} on {fit['points']} points, "
            f"off by {fit['error_max']:.1%} at most"
        )
    parts = "; ".join(
        f"{name} by {part['source']}: R^2 {part['r2']:.5f} on {part['points']:,} points"
        for name, part in ((name, fit[name]) for name in ("prefill", "decode"))
    )
    constants = (
        f"beta {model['beta'] * 1e3:.4g} ms, gamma {model['gamma']:.4g}, "
        f"prefill {model['prefill'] * 1e6:.4g} us/token, context {model['context'] * 1e9:.4g} ns/token"
    )
    return f"model: {constants}; {parts}"


def _each(values: Any) -> list[Any]:
    """Different ones."""
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found


def _all(results: Sequence[Result], text: Callable[[Result], str]) -> str:
    return ", ".join(dict.fromkeys(text(told) for told in results))


def _at(told: Mapping[str, Any], *path: str) -> Any:
    at: Any = told
    for name in path:
        at = at.get(name) if isinstance(at, Mapping) else None
    return at


def _seconds(*path: str) -> Callable[[Result], str]:
    return lambda told: _fixed(_at(told, *path), 3 if path[0] == "metrics" else 2)


def _fixed(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1_000 else f"{value:,.0f}"
