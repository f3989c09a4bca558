"""What a capture lacks, as lines to read: the public JSON of an integrity check in words."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

__all__ = ["headline", "render_integrity"]


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
    elif not unexplained:
        said.append(f"{missing:,} missing, all accounted for")
    else:
        at_least = "" if all(capture["exact"] for capture in captures) else "at least "
        said.append(f"{missing:,} missing, {at_least}{unexplained:,} of them unexplained")
    if twice:
        said.append(f"{twice:,} there twice")
    if integrity["broken"]:
        said.append(f"{len(integrity['broken']):,} files could not be read")
    if not all(capture["closed"] for capture in captures):
        said.append("not closed: what began after the last word is not known")
    return " · ".join(said)


def render_integrity(integrity: Mapping[str, Any]) -> RenderableType:
    """All captures, relays and ranges."""
    style = "bold green" if integrity["ok"] else "bold red"
    lines = [Text(headline(integrity), style=style)]
    lines += [Text(f"broken     {one['file']}: {one['problem']}") for one in integrity["broken"]]
    for capture in integrity["captures"]:
        lines += map(Text, _capture_lines(capture))
    return Group(*lines)


def _capture_lines(capture: Mapping[str, Any]) -> Iterator[str]:
    name = capture["capture"] or "(no id)"
    yield f"capture    {name}: {capture['present']:,} present, {capture['missing']:,} missing"
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


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.items())


def _ranges(ranges: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
