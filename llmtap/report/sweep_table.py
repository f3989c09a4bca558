"""A sweep as a table for the terminal: a row for each run, and a column for each setting that varies.

Takes the public JSON of results, as `report/sweep.py` does. What does not vary is said below the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from llmtap.report.sweep import Result, number, option_text, settings_of, values_text

__all__ = ["sweep_lines", "sweep_table"]

_Column = tuple[str, Callable[[Result], str]]

_UNSERVED: Final = {"refused": ("too_large", "queue_full"), "given up": ("late", "late_midway")}
"""By the reason: before a server took them up, or later."""
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
    offered = list(dict.fromkeys(_offered(told) for told in results))
    line = f"late: outside the request SLA of {request_sla} s; slow: outside the token SLA of {token_sla} ms."
    yield line + (f" Offered: {offered[0]}." if len(offered) == 1 else "")
    if any(told["readings"].get("bin_edges") for told in results):
        yield "bins: by the edges given, " + values_text(
            told["readings"].get("bin_edges") for told in results
        )
    yield from _not_served(results)
    for allowed in _each(_at(told, "capacity", "allowed") for told in results):
        yield (
            f"capacity: the highest rate at which no more than {allowed:.3g} of the requests are late; "
            "0: there is none; no limit: all may come at once. It falls with more requests, as queues grow"
        )
    objectives = values_text((told.get("goodput") or {}).get("objectives") for told in results)
    if objectives:
        yield f"goodput: requests that met {objectives}"
    for reader in _each(_reader(told.get("smooth_goodput") or {}) for told in results):
        yield f"smooth: {reader}; idle: what such a reader waited with nothing to read"
    for fit, model in _each((told.get("fit"), told["model"]) for told in results):
        yield _model(fit, model)


def _offered(told: Result) -> str:
    rate = told["load"]["offered_rps"]
    return "all at once" if rate is None else f"{rate:.4g} requests/s on average"


def _unserved(results: Sequence[Result]) -> Iterator[_Column]:
    """How many a scheduler did not serve, or not to the end, where it did so to some."""
    for title, reasons in _UNSERVED.items():
        if any(_count(told, *reasons) for told in results):
            yield title, lambda told, reasons=reasons: f"{_count(told, *reasons):,}"  # type: ignore[misc]


def _count(told: Result, *reasons: str) -> int:
    unserved = told.get("unserved") or {}
    return sum(unserved.get(reason, 0) for reason in reasons)


def _not_served(results: Sequence[Result]) -> Iterator[str]:
    """Why requests were refused and given up, with what they did not fit."""
    said = {
        "too_large": ("refused", "need more than the KV memory holds", ("kv_tokens",)),
        "queue_full": ("refused", "came when as many waited as may", ("queue_max",)),
        "late": ("given up", "had no token in time", ("ttft",)),
        "late_midway": ("given up", "had a token too late and were served no further", ("ttft", "tbt")),
    }
    for reason, (what, why, options) in said.items():
        found = [told for told in results if _count(told, reason)]
        if found:
            counts = values_text(_count(told, reason) for told in found)
            several = " in a run" if len(found) > 1 else ""
            limits = ", ".join(
                f"{name} {_all(found, lambda told, name=name: option_text(name, told['serving'][name]))}"  # type: ignore[misc]
                for name in options
            )
            yield f"{what}: {counts} requests{several} {why} ({limits})"
    if any(_count(told, reason) for told in results for reason in ("too_large", "queue_full")):
        yield "who was refused is late, and in no other figure: of few who are served, few are slow"


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
    return lambda told: option_text(name, settings_of(told).get(name))


def _reader(smooth: Mapping[str, Any]) -> str | None:
    if smooth.get("speed_tokens_per_second") is None:
        return None
    speed, alpha = number(smooth["speed_tokens_per_second"]), number(smooth["alpha"])
    return f"goodput for a reader of {speed} tokens/s, alpha {alpha}"


def _capacity(told: Result) -> str:
    found = told.get("capacity")
    return "no limit" if found and found["rps"] is None else _rate(_at(told, "capacity", "rps"))


def _model(fit: Mapping[str, Any] | None, model: Mapping[str, float]) -> str:
    """The formula by its name, its constants, and how they came about."""
    if "alpha" in model:
        formula = "T(b, L) = alpha + beta L (1 + gamma (b - 1)/b) of a batch"
        constants = [f"alpha {model['alpha'] * 1e3:.4g} ms", f"beta {model['beta'] * 1e3:.4g} ms/token"]
    else:
        formula = "T(p, d, c) = beta (1 + gamma (d - 1)/d) + prefill p + context c of an iteration"
        constants = [f"beta {model['beta'] * 1e3:.4g} ms"]
    constants.append(f"gamma {model['gamma']:.4g}")
    if "alpha" not in model:
        constants.append(f"prefill {model['prefill'] * 1e6:.4g} us/token")
        constants.append(f"context {model['context'] * 1e9:.4g} ns/token")
    return f"model {formula}: {', '.join(constants)}; {_fitted(fit)}"


def _fitted(fit: Mapping[str, Any] | None) -> str:
    if fit is None:
        return "seed 004's GPU"
    if "grid" in fit:
        return f"R^2 {fit['r2']:.5f} on {fit['points']} points, off by {fit['error_max']:.1%} at most"
    return "; ".join(
        f"{name} by {part['source']}: R^2 {part['r2']:.5f} on {part['points']:,} points"
        for name, part in ((name, fit[name]) for name in ("prefill", "decode"))
    )


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
