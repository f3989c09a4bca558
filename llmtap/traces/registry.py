"""All trace formats, by name, by what a file begins with, and by what a file is called."""

import difflib
from typing import Final

from llmtap.traces.format import FormatError, TraceFormat
from llmtap.traces.formats import (
    aiperf,
    azure,
    bailian,
    burstgpt,
    guidellm,
    har,
    inference_perf,
    mooncake,
    openai_batch,
    parquet_capture,
    sharegpt,
    vidur,
    vllm,
)

__all__ = ["FORMATS", "SNIFF_BYTES", "by_name", "detect", "for_target"]

SNIFF_BYTES: Final = 64 << 10
"""Of a file's beginning, decompressed, that formats are told by."""

FORMATS: Final[tuple[TraceFormat, ...]] = (
    parquet_capture.FORMAT,
    mooncake.FORMAT,
    azure.FORMAT,
    burstgpt.FORMAT,
    bailian.FORMAT,
    *aiperf.FORMATS,
    *guidellm.FORMATS,
    inference_perf.FORMAT,
    *vllm.FORMATS,
    vidur.FORMAT,
    sharegpt.FORMAT,
    *openai_batch.FORMATS,
    har.FORMAT,
)


def by_name(name: str, *, writing: bool = False) -> TraceFormat:
    """The format of that name. Raises FormatError, which names the nearest, for none that can do it."""
    able = [f for f in FORMATS if (f.write if writing else f.read) is not None]
    names = [f.name for f in able]
    if name in names:
        return able[names.index(name)]
    do = "write" if writing else "read"
    if any(f.name == name for f in FORMATS):
        raise FormatError(f"the format {name} is known, but not to {do}")
    near = [n for n in names if name and n.startswith(name)] or difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    raise FormatError(f"no format to {do} is called {name!r}; {meant}")


def detect(name: str, head: bytes) -> TraceFormat:
    """The format of a file of this name that begins like this. Raises FormatError where that is not one."""
    if not head.strip():
        raise FormatError("the file is empty" if not head else "there is nothing but white space in the file")
    claims = [f for f in FORMATS if f.read is not None and f.sniff(head, name)]
    if len(claims) > 1:
        by_ending = [f for f in claims if name.lower().endswith(f.extensions)]
        claims = by_ending or claims
    if not claims:
        raise FormatError(
            "its content is that of none of the formats known (`llmtap convert --list`); "
            "give --from if it is one of them"
        )
    if len(claims) > 1:
        raise FormatError(f"it may be {' or '.join(f.name for f in claims)}; give --from")
    return claims[0]


def for_target(name: str) -> TraceFormat:
    """The format that a file of this name is written in. Raises FormatError where that is not one."""
    lower = name.lower()
    fits = [f for f in FORMATS if f.write is not None and lower.endswith(f.extensions)]
    # A longer ending says more: `.llmtap.json` over `.json`.
    longest = max((len(e) for f in fits for e in f.extensions if lower.endswith(e)), default=0)
    fits = [f for f in fits if any(len(e) == longest and lower.endswith(e) for e in f.extensions)]
    if len(fits) == 1:
        return fits[0]
    known = [f for f in FORMATS if f.write is not None]
    if not fits:
        raise FormatError(f"its name tells no format; give --to: {', '.join(f.name for f in known)}")
    raise FormatError(f"its name may mean {', '.join(f.name for f in fits)}; give --to")
