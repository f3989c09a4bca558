"""What a capture lacks, as lines to read: the public JSON of an integrity check in words."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

__all__ = ["broken_lines", "headline", "render_integrity"]

_SHARE_MAX: Final = 0.01
"""Above this, what is missing may be of one kind (the long ones, the busiest minute) and move the figures."""
_NAMED_MAX: Final = 20
_OPEN_MAX: Final = 3


def headline(integrity: Mapping[str, Any]) -> str:
    """All of it in one line."""
    captures = integrity["captures"]
    if not captures:
        return f"{integrity['unnumbered']:,} exchanges without numbers: nothing can be said of missing ones"
    present, missing, unexplained, twice = (
        sum(capture[name] for capture in captures)
        for name in ("present", "missing", "unexplained", "duplicates")
    )
    said = [f"{present:,} present"]
    if not missing:
        said.append("none missing")
    else:
        share = missing / (present + missing)
        lacking = f"{missing:,} missing ({_percent(share)})"
        if unexplained:
            at_least = "" if all(capture["exact"] for capture in captures) else "at least "
            said.append(f"{lacking}, {at_least}{unexplained:,} of them unexplained")
        else:
            said.append(f"{lacking}, why is known of all")
        if share > _SHARE_MAX:
            said.append("figures may be biased: these are not in them")
    if twice:
        said.append(f"{twice:,} there twice")
    if integrity["broken"]:
        n = len(integrity["broken"])
        said.append(f"{n:,} file{'' if n == 1 else 's'} could not be read")
    if open_ := [capture["capture"] or "(no id)" for capture in captures if not capture["closed"]]:
        names = ", ".join(open_[:_OPEN_MAX]) + (
            f" and {len(open_) - _OPEN_MAX:,} more" if len(open_) > _OPEN_MAX else ""
        )
        said.append(
            f"not closed: {names}: runs still, or was killed; what began after its last word is not known"
        )
    return " · ".join(said)


def broken_lines(broken: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The files that were passed over, by name."""
    for one in broken[:_NAMED_MAX]:
        yield f"broken     {one['file']}: {one['problem']}"
    if len(broken) > _NAMED_MAX:
        yield f"broken     and {len(broken) - _NAMED_MAX:,} more (--json names all)"


def render_integrity(integrity: Mapping[str, Any]) -> RenderableType:
    """All captures, relays and ranges."""
    style = "bold green" if integrity["ok"] else "bold red"
    lines = [Text(headline(integrity), style=style)]
    lines += [Text(line) for line in broken_lines(integrity["broken"])]
    for capture in integrity["captures"]:
        lines += map(Text, _capture_lines(capture))
    return Group(*lines)


def _capture_lines(capture: Mapping[str, Any]) -> Iterator[str]:
    name = capture["capture"] or "(no id)"
    closed = "" if capture["closed"] else ", not closed"
    yield f"capture    {name}: {capture['present']:,} present, {capture['missing']:,} missing{closed}"
    if capture["not_kept"]:
        yield f"  measured and not kept: {_counts(capture['not_kept'])}"
    if capture["damaged"]:
        yield f"  damaged in the spool: {_counts(capture['damaged'])}"
    if capture["meters"] > 1:
        yield f"  {capture['meters']:,} runs of the meter wrote it"
    if capture["unexplained"]:
        at_least = "" if capture["exact"] else "at least "
        yield f"  unexplained: {at_least}{capture['unexplained']:,}"
    for relay in capture["relays"]:
        yield from _relay_lines(relay)


def _relay_lines(relay: Mapping[str, Any]) -> Iterator[str]:
    yield f"  relay {relay['relay']}: {relay['opened']:,} begun, {relay['present']:,} present"
    if relay["missing"]:
        yield f"    missing {relay['missing']:,}: {_ranges(relay['ranges'])}"
        known = [f"dropped {_counts(relay['dropped'])}"] if relay["dropped"] else []
        known += [f"under way at its last word {relay['unsettled']:,}"] if relay["unsettled"] else []
        known += [f"begun after it {relay['since']:,}"] if relay["since"] else []
        yield f"    accounted for: {', '.join(known) or 'nothing'}"
    if relay["duplicates"]:
        yield f"    there twice: {relay['duplicates']:,}"
    for step in relay["clock_set"]:
        yield f"    its wall clock had been set before {step['seq']:,}"


def _percent(share: float) -> str:
    """Never 0 % of something, nor 100 % of less than all."""
    return "under 0.1%" if share < 0.001 else f"{min(share, 0.999):.1%}" if share < 1 else "all"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.items())


def _ranges(ranges: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
