"""The list of all trace formats: find one by its name, by the beginning of a file, or by a file name.

`by_name`, `detect` (for reading) and `for_target` (for writing) return a `TraceFormat` of `formats/`.
"""

import difflib
from typing import Final

from llmtap.traces.format import FormatError, TraceFormat
from llmtap.traces.formats import (
    aiperf,
    azure,
    bailian,
    burstgpt,
    dynamo,
    guidellm,
    har,
    mooncake,
    openai_batch,
    otlp,
    parquet_capture,
    sharegpt,
    vllm,
    weka,
)

SNIFF_BYTES: Final = 64 << 10
"""Beginning of a file, decompressed, by which its format is recognised."""

FORMATS: Final[tuple[TraceFormat, ...]] = (
    parquet_capture.FORMAT,
    mooncake.FORMAT,
    azure.AZURE,
    burstgpt.FORMAT,
    bailian.FORMAT,
    dynamo.FORMAT,
    *aiperf.FORMATS,
    *guidellm.FORMATS,
    azure.INFERENCE_PERF,
    *vllm.FORMATS,
    sharegpt.FORMAT,
    openai_batch.FORMAT,
    har.FORMAT,
    otlp.FORMAT,
    weka.FORMAT,
)


def by_name(name: str, *, writing: bool = False) -> TraceFormat:
    """Return the format of that name. Raises FormatError, which proposes the nearest name."""
    found = next((f for f in FORMATS if f.name == name), None)
    if found is not None:
        if writing and found.writes is None:
            raise FormatError(f"{name} can only be read")
        return found
    names = [f.name for f in FORMATS if not writing or f.writes is not None]
    near = [n for n in names if name and n.startswith(name)] or difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    raise FormatError(f"no format to {'write' if writing else 'read'} is called {name!r}; {meant}")


def detect(name: str, head: bytes) -> TraceFormat:
    """Return the format of a file by its beginning and name. Raises FormatError unless it is exactly one."""
    if not head.strip():
        raise FormatError("the file is empty" if not head else "there is nothing but white space in the file")
    claims = [f for f in FORMATS if f.sniff(head, name)]
    if len(claims) > 1:
        by_ending = [f for f in claims if name.lower().endswith(f.extensions)]
        claims = by_ending or claims
    if not claims:
        raise FormatError(
            "its content is that of none of the formats known (`llmtap convert --list`); "
            "if it is one of them, `llmtap convert --from` reads it"
        )
    if len(claims) > 1:
        raise FormatError(
            f"it may be {' or '.join(f.name for f in claims)}; `llmtap convert --from` selects one"
        )
    return claims[0]


def for_target(name: str) -> TraceFormat:
    """Return the format for a new file of this name. Raises FormatError unless it is exactly one."""
    lower = name.lower()
    written = [f for f in FORMATS if f.writes is not None]
    fits = [f for f in written if lower.endswith(f.extensions)]
    # A longer ending says more: `.llmtap.json` over `.json`.
    longest = max((len(e) for f in fits for e in f.extensions if lower.endswith(e)), default=0)
    fits = [f for f in fits if any(len(e) == longest and lower.endswith(e) for e in f.extensions)]
    if len(fits) == 1:
        return fits[0]
    if not fits:
        raise FormatError(
            f"the format is not known from the name; give --to: {', '.join(f.name for f in written)}"
        )
    raise FormatError(f"its name may mean {', '.join(f.name for f in fits)}; give --to")
