"""Find a workload by its name on the command line, draw its requests, and describe it for reports.

`llmtap replay`, `bench` and `sim run` take their workloads from here.

A name is a reference workload of the IETF draft (`ietf.py`), a workload of `sim run` (`synthetic.py`), the
path of a TOML file (`custom.py`), or KIND:FILE for local data (`datasets.py`). Traces are read by `trace.py`.
"""

import difflib
import hashlib
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.workload.arrivals import OWN_RATES, parse_arrivals
from llmtap.workload.composed import Composed
from llmtap.workload.custom import load_workload
from llmtap.workload.datasets import (
    SHAREGPT_CONTENT,
    STACK_CONTENT,
    RecordedDataset,
    read_sharegpt,
    read_stack,
)
from llmtap.workload.ietf import (
    CODE_COMPLETION,
    CONVERSATION,
    LONG_CONTEXT,
    LONG_CONTEXT_UNIFORM,
    SKEWED,
    UNIFORM,
    SyntheticWorkload,
    code_completion_of,
    conversation_of,
)
from llmtap.workload.prompts.prompt import Workload
from llmtap.workload.requests import Requests
from llmtap.workload.synthetic import WORKLOADS, Simulated, draw

DEFAULT_SEED: Final = 42
"""IETF draft, A.1.4."""
REFERENCE: Final[Mapping[str, Composed | SyntheticWorkload]] = {
    workload.name: workload
    for workload in (UNIFORM, SKEWED, CONVERSATION, CODE_COMPLETION, LONG_CONTEXT, LONG_CONTEXT_UNIFORM)
}


def _sharegpt(path: Path, place: str, *, whole: bool = False) -> RecordedDataset:
    data = read_sharegpt(path, place, whole=whole)
    what = "whole conversations" if whole else "first questions"
    about = {"about": f"{what} of {path.name}", "source": "a local file"}
    return RecordedDataset(f"sharegpt{'-turns' * whole}", data, SHAREGPT_CONTENT, about=about)


def _sharegpt_turns(path: Path, place: str) -> RecordedDataset:
    return _sharegpt(path, place, whole=True)


def _stack(path: Path, place: str) -> RecordedDataset:
    about = {"about": f"functions of {path.name} to complete", "source": "a local file"}
    return RecordedDataset("stack", read_stack(path, place), STACK_CONTENT, about=about)


_OF_FILES: Final[Mapping[str, tuple[Callable[[Path, str], RecordedDataset], str]]] = {
    "sharegpt": (_sharegpt, "first questions and answers of a ShareGPT-shaped JSON file"),
    "sharegpt-turns": (_sharegpt_turns, "the same, whole conversations turn by turn"),
    "stack": (_stack, "functions to complete of a Stack-shaped JSONL file"),
    "conversation": (conversation_of, "the reference workload with a ShareGPT-shaped file's texts"),
    "code-completion": (code_completion_of, "the reference workload with a Stack-shaped file's functions"),
}


def workloads() -> dict[str, str]:
    named = {name: str(workload.describe()["about"]) for name, workload in REFERENCE.items()}
    drawn = {name: workload.about for name, workload in WORKLOADS.items()}
    files = {f"{kind}:FILE": about for kind, (_, about) in _OF_FILES.items()}
    return named | drawn | files | {"FILE.toml": "a workload of your own: see config/workload.toml"}


def workload_named(text: str, place: str) -> Workload:
    """Return the workload of a name. Raises ConfigError of the place, or of a key in a workload's file."""
    if text in REFERENCE:
        return REFERENCE[text]
    if text in WORKLOADS:
        return Simulated(text, WORKLOADS[text])
    if text.endswith(".toml"):
        return load_workload(Path(text))
    kind, colon, file = text.partition(":")
    if colon and kind in _OF_FILES:
        return _OF_FILES[kind][0](Path(file), place)
    known = [*REFERENCE, *WORKLOADS]
    if kind in _OF_FILES and kind not in known:
        raise ConfigError(place, f"{kind} is the workload of a file, and none is named", f"{kind}:FILE")
    near = difflib.get_close_matches(text, known, 1, 0.5)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"one of {', '.join([*known, *list(workloads())[len(known) :]])}"
    )
    raise ConfigError(place, f"no workload is called {text!r}", hint)


def is_workload(text: str) -> bool:
    kind, colon, _ = text.partition(":")
    named = text in REFERENCE or text in WORKLOADS
    return named or text.endswith(".toml") or (bool(colon) and kind in _OF_FILES)


def drawn_requests(text: str, count: int, seed: int, place: str) -> Requests:
    """Return requests with their default arrivals: the workload's process and rate, else Poisson at 1/s.
    Raises ConfigError as `workload_named`, and for conversations."""
    if text in WORKLOADS:
        return draw(WORKLOADS[text], count, seed)
    workload = workload_named(text, place)
    requests = workload.requests(count, seed)
    if requests.after:
        raise ConfigError(
            place, f"{text} has conversations, whose later turns wait for the answer before them"
        )
    told = workload.describe()
    process = str(told.get("arrivals") or "poisson")
    own_rate = process.partition(":")[0] in OWN_RATES
    rate = None if own_rate else float(str(told.get("rate_rps") or 1))
    arrivals = parse_arrivals(process, rate_rps=rate, seed=seed, place=place)
    requests.arrival_ns = array("q", islice(arrivals, len(requests)))
    return requests


def report_of(workload: Workload, requests: Requests, seed: int) -> dict[str, Any]:
    """Return the description of a workload for reports (IETF draft, 4.3.3), with seed and digest."""
    columns = hashlib.sha256()
    for column in (requests.input, requests.output, requests.after, requests.think_ns):
        columns.update(b"%d:" % len(column) + ",".join(map(str, column)).encode() + b";")
    shared = ";".join(",".join(map(str, ids)) for ids in requests.blocks)
    columns.update(b"%d:" % requests.block_tokens + shared.encode())
    return {
        **workload.describe(), "seed": seed, "requests": len(requests), "sha256": columns.hexdigest(),
    }  # fmt: skip
