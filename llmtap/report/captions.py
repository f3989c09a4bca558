"""What the figures of a sweep rest on, in words: load, window, counting, objectives, model, options.

A figure that leaves the page, printed or as a screenshot, takes its caption along, so each says all of it.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmtap.report.sweep import Result, number, option_text, values_text

__all__ = ["NOT_MEASURED", "Defaults", "OptionRow", "options_rows", "rests_on", "settings_rows"]

Defaults = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By scheduler: options as public JSON by their group, `readings` and `serving`, as they are when nobody sets
them."""

NOT_MEASURED: Final = "Simulated in virtual time by a latency model; no GPU was measured."
_GROUPS: Final = ("readings", "serving")
_MODES: Final = {"open": "open loop", "closed": "closed loop"}


def settings_rows(results: Sequence[Result], defaults: Defaults | None) -> list[tuple[str, str]]:
    """Term and text of all that is the same for every figure; terms without a text are left out."""
    rows = [
        ("scheduler", values_text((r.get("scheduler") for r in results), limit=99)),
        ("trace", values_text((r.get("trace") for r in results), limit=99)),
        ("requests", values_text(r.get("n") for r in results)),
        ("load", _load(results)),
        ("window", _window(results)),
        ("servers", values_text(r.get("servers") for r in results)),
        ("seed", values_text(r.get("seed") for r in results)),
        ("model", _model(results)),
        ("options", _changed(results, defaults)),
        ("ITL", _itl(results)),
        ("tokens", _tokens(results)),
        ("smooth goodput", _smooth(results)),
        ("objectives", _objectives(results)),
        ("SLA", _sla(results)),
        ("capacity", _allowed(results)),
        ("uncertainty", _uncertainty(results)),
    ]
    return [(term, text) for term, text in rows if text]


def rests_on(
    results: Sequence[Result], samples: str, says: Sequence[str], defaults: Defaults | None
) -> list[str]:
    """One figure's caption, in parts. `says` are terms of `settings_rows` that this figure needs beside
    those that every figure does.
    """
    rows = dict(settings_rows(results, defaults))
    parts = [samples]
    for term in (*says, "load", "window", "seed", "model", "options"):
        if term in rows:
            named = term in ("load", "ITL", "SLA", "options")
            parts.append(rows[term] if named else f"{term} {rows[term]}")
    return [*parts, NOT_MEASURED]


@dataclass(frozen=True, slots=True)
class OptionRow:
    """An option among the runs whose schedulers read it."""

    name: str
    values: str
    default: str
    """Empty where it is not known."""
    changed: bool
    """In some run it is not as it is by default."""


def options_rows(results: Sequence[Result], defaults: Defaults | None) -> list[OptionRow]:
    """Each option that any of the schedulers reads."""
    rows = []
    for group in _GROUPS:
        for name in dict.fromkeys(name for r in results for name in r.get(group) or {}):
            read = [r for r in results if (r.get(group) or {}).get(name) is not None]
            usual = [_default(r, defaults, group, name) for r in read]
            values = [option_text(name, r[group][name]) for r in read]
            changed = any(default and value != default for value, default in zip(values, usual, strict=True))
            if read:
                rows.append(OptionRow(name, _texts(values), _texts(usual), changed))
    return rows


def _default(result: Result, defaults: Defaults | None, group: str, name: str) -> str:
    of_scheduler = (defaults or {}).get(result.get("scheduler") or "", {}).get(group, {})
    return option_text(name, of_scheduler[name]) if name in of_scheduler else ""


def _texts(texts: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))


def _load(results: Sequence[Result]) -> str:
    loads = [r.get("load") or {} for r in results]
    modes = values_text(_MODES.get(mode, mode) for load in loads if (mode := load.get("mode")))
    offered = values_text((_rounded(load.get("offered_rps")) for load in loads), limit=3)
    return ", ".join(part for part in (modes, offered and f"offered {offered} req/s") if part)


def _window(results: Sequence[Result]) -> str:
    windows = [r.get("window") or {} for r in results]
    seconds = values_text((_rounded(w.get("seconds")) for w in windows), limit=2)
    return ", ".join(
        part for part in (values_text(w.get("name") for w in windows), seconds and f"{seconds} s") if part
    )


def _model(results: Sequence[Result]) -> str:
    told = []
    for r in results:
        text = ", ".join(f"{name} {number(value, 6)}" for name, value in (r.get("model") or {}).items())
        if fit := r.get("fit"):
            text += f" (fitted to {fit.get('grid', 'measurements')}, R^2 {number(fit.get('r2'), 5)})"
        told.append(text or None)
    text = "; or ".join(dict.fromkeys(one for one in told if one))
    return text and f"{text} (in seconds but for gamma)"


def _changed(results: Sequence[Result], defaults: Defaults | None) -> str:
    """Options that are not as they are by default, in any run."""
    if defaults is None:
        return ""
    said = [f"{row.name} {row.values}" for row in options_rows(results, defaults) if row.changed]
    return f"set: {', '.join(said)}" if said else "options at their defaults"


def _itl(results: Sequence[Result]) -> str:
    options = values_text(((r.get("metrics") or {}).get("itl") or {}).get("option") for r in results)
    return options and f"ITL option {options}"


def _tokens(results: Sequence[Result]) -> str:
    sources = values_text(source for r in results for source in (r.get("tokens") or {}).get("source") or ())
    return sources and f"counted by {sources}"


def _smooth(results: Sequence[Result]) -> str:
    told = []
    for r in results:
        smooth = r.get("smooth_goodput") or {}
        if smooth.get("alpha") is not None:
            speed = number(smooth["speed_tokens_per_second"])
            told.append(f"alpha {number(smooth['alpha'])}, reader of {speed} tokens/s")
        elif smooth.get("readers"):
            told.append(f"{len(smooth['readers'])} readers of different speed")
        if told and smooth.get("idle"):
            told[-1] += f", idle {smooth['idle']}"
    return "; or ".join(dict.fromkeys(told))


def _objectives(results: Sequence[Result]) -> str:
    return "; or ".join(dict.fromkeys(r["goodput"]["objectives"] for r in results if r.get("goodput")))


def _sla(results: Sequence[Result]) -> str:
    bounds = (("request", "request_sla"), ("token", "token_sla"))
    told = [(name, values_text(_values(results, "readings", key))) for name, key in bounds]
    return ", ".join(f"{name} SLA {text} s" for name, text in told if text)


def _allowed(results: Sequence[Result]) -> str:
    shares = values_text(r["capacity"]["allowed"] * 100 for r in results if r.get("capacity"))
    return shares and f"with at most {shares} % late"


def _uncertainty(results: Sequence[Result]) -> str:
    text = values_text(r.get("uncertainty") for r in results)
    return text and f"{text} s"


def _values(results: Sequence[Result], group: str, name: str) -> Iterator[Hashable]:
    for r in results:
        if name in (r.get(group) or {}):
            yield values_text((r[group][name],))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
