"""Find a workload by its name on the command line, load a user's workload, and describe workloads.

`llmtap replay`, `bench` and `sim run` take their workloads from here. A name is a reference workload of the
IETF draft (`ietf.py`), one of SIMULATED, KIND:FILE for local data (`datasets.py`), or the path of a TOML
file, of which `config/workload.toml` shows every key. Traces are read by `trace.py`.
"""

import difflib
import hashlib
import math
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from llmtap.errors import ConfigError
from llmtap.units import read_special
from llmtap.user_files import read_toml
from llmtap.workload import ietf
from llmtap.workload.arrivals import OWN_RATES, parse_arrivals
from llmtap.workload.datasets import RecordedDataset
from llmtap.workload.lengths import ExponentialLengths, Fixed, Lengths, LogNormal, Percentiles, as_lengths
from llmtap.workload.plan import REQUEST, SET_BY, ComposedWorkload, Conversations, RandomIds, Sharing
from llmtap.workload.prompts.prompt import CL100K_IDS, Workload
from llmtap.workload.prompts.prose import Code, Document, ProseWords, ProseWriter
from llmtap.workload.public_data import PUBLISHED
from llmtap.workload.requests import Requests

DEFAULT_SEED: Final = 42
"""Default seed, from the IETF draft, A.1.4."""
REFERENCE: Final[Mapping[str, ComposedWorkload | ietf.SyntheticWorkload]] = {
    workload.name: workload
    for workload in (
        ietf.UNIFORM,
        ietf.SKEWED,
        ietf.CONVERSATION,
        ietf.CODE_COMPLETION,
        ietf.LONG_CONTEXT,
        ietf.LONG_CONTEXT_UNIFORM,
    )
}

_CHAT_INPUT: Final = LogNormal(median=156, p95=892, max=8_192)
_CHAT_OUTPUT: Final = LogNormal(median=234, p95=789, max=4_096)

_BURSTGPT_INPUT: Final = Percentiles(
    points=((25, 77), (50, 251), (75, 730), (95, 2_461), (99, 4_748)), max=16_000
)
_BURSTGPT_OUTPUT: Final = Percentiles(
    points=((25, 11), (50, 34), (75, 113), (95, 460), (99, 1_500)), max=4_096
)
"""Lengths of BurstGPT's trace. Medians and p95 are from the multi-bin batching paper, 3.1; the other points,
and the correlation of 0.5, are fitted to the means and to the statistics of the total length."""


def _simulated_workload(
    name: str, inputs: Lengths, outputs: Lengths, about: str, **arrivals: Any
) -> ComposedWorkload:
    meta = {"about": about, "source": "llmtap sim run", "arrivals": "poisson", "rate_rps": 1.0, **arrivals}
    return ComposedWorkload(name, inputs, outputs, about=meta)


SIMULATED: Final[Mapping[str, ComposedWorkload]] = {
    workload.name: workload
    for workload in (
        _simulated_workload(
            "chat",
            _CHAT_INPUT,
            _CHAT_OUTPUT,
            "chats: input of median 156 and p95 892, output of 234 and 789 (IETF draft, A.3); Poisson"
            " arrivals",
        ),
        _simulated_workload(
            "long-chat",
            # Median 1,400 and mean 1,600: the mean of a lognormal is median * exp(sigma^2 / 2).
            LogNormal(mu=math.log(1_400), sigma=math.sqrt(2 * math.log(1_600 / 1_400)), max=8_192),
            _CHAT_OUTPUT,
            "chats with prompts of 1,600 tokens on average, outputs as in chat; Poisson arrivals",
        ),
        _simulated_workload(
            "mm1",
            Fixed(tokens=1),
            ExponentialLengths(mean=1_000, max=1 << 20),
            "prompts of 1 token, answers of exponential length with mean 1,000; Poisson arrivals: served one"
            " by one, nearly an M/M/1 queue",
        ),
        _simulated_workload(
            "equal-lengths",
            Fixed(tokens=1),
            Fixed(tokens=256),
            "prompts of 1 token, answers of 256 tokens; Poisson arrivals",
        ),
        replace(
            _simulated_workload(
                "bursty",
                _BURSTGPT_INPUT,
                _BURSTGPT_OUTPUT,
                "as in BurstGPT: input of median 251, mean 611 and p95 2,461, output of 34, 123 and 460, both"
                " together 327, 734 and 2,801; 80 % ChatGPT, 20 % GPT-4; gaps with a CV of 13.28",
                arrivals="gamma:cv=13.28",
                rate_rps=0.27,
            ),
            correlation=0.5,
            models={"ChatGPT": 0.8, "GPT-4": 0.2},
        ),
    )
}
"""Workloads that have their own arrivals, for `sim run` and the demo."""
_WORKLOADS: Final = {**REFERENCE, **SIMULATED}
_FILE_WORKLOADS: Final[Mapping[str, tuple[Callable[[Path, str], RecordedDataset], str]]] = {
    "conversation": (ietf.conversation_of, "the reference workload with a ShareGPT-shaped file's texts"),
    "code-completion": (
        ietf.code_completion_of,
        "the reference workload with a Stack-shaped file's functions",
    ),
    "long-conversation": (
        ietf.long_conversation_of,
        "items of a ShareGPT-shaped file, concatenated to prompts of 1,600 tokens on average (001, 5.1)",
    ),
}


def workload_texts() -> dict[str, str]:
    """Return a sentence on each workload, by the name on the command line."""
    named = {name: str(workload.describe()["about"]) for name, workload in _WORKLOADS.items()}
    files = {f"{kind}:FILE": about for kind, (_, about) in _FILE_WORKLOADS.items()}
    return named | files | {"FILE.toml": "a workload of your own: see config/workload.toml"}


def workload_named(text: str, place: str) -> Workload:
    """Return the workload of a name. Raises ConfigError naming `place`, or a key in the workload's file."""
    if text in _WORKLOADS:
        return _WORKLOADS[text]
    if text.endswith(".toml"):
        return load_workload(Path(text))
    kind, colon, file = text.partition(":")
    if kind in _FILE_WORKLOADS:
        data_set = PUBLISHED[kind]
        if not colon:
            raise ConfigError(place, f"{kind} requires a file of {data_set.title}", data_set.where_text)
        if not Path(file).exists():
            raise ConfigError(place, f"there is no file {file}", data_set.where_text)
        return _FILE_WORKLOADS[kind][0](Path(file), place)
    near = difflib.get_close_matches(text, _WORKLOADS, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(workload_texts())}"
    raise ConfigError(place, f"no workload is called {text!r}", hint)


def is_workload(text: str) -> bool:
    return text in _WORKLOADS or text.endswith(".toml") or text.partition(":")[0] in _FILE_WORKLOADS


def draw_requests(text: str, count: int, seed: int, place: str) -> Requests:
    """Return requests with their default arrivals: the workload's process and rate, else Poisson at 1/s.

    Raises the errors of `workload_named`, and ConfigError if the workload has conversations.
    """
    workload = workload_named(text, place)
    requests = workload.requests(count, seed)
    if requests.after:
        problem = f"{text} has conversations, but a workload of single requests is needed"
        raise ConfigError(place, problem, "use another workload")
    description = workload.describe()
    process = str(description.get("arrivals") or "poisson")
    own_rate = process.partition(":")[0] in OWN_RATES
    rate = None if own_rate else float(str(description.get("rate_rps") or 1))
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
    return {**workload.describe(), "seed": seed, "requests": len(requests), "sha256": columns.hexdigest()}


# ---------------------------------------------------------------- workloads in a user's file

_HINT: Final = "config/workload.toml shows every key and distribution"


class _Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[content]` of a workload file."""

    kind: Literal["words", "code", "document", "ids"] = "words"
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=1 << 31)] = CL100K_IDS
    """Upper bound of the token ids, if `kind` is `ids`."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[request]` of a workload file."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    stop: list[str] | None = None
    ignore_eos: bool | None = None
    extra: dict[str, Any] = {}


_REQUEST_FIELDS: Final = tuple(name for name in _Request.__struct_fields__ if name != "extra")
_Lengths = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | Lengths


class WorkloadFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a workload file."""

    input: _Lengths
    output: _Lengths
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = ""
    """Name of the workload; default: the file's name."""
    about: str = ""
    content: _Content = _Content()
    sharing: Sharing | None = None
    conversations: Conversations | None = None
    request: _Request = _Request()
    arrivals: str = ""
    """Default arrival process of a run. The run sets the rate."""


def load_workload(path: Path) -> ComposedWorkload:
    """Load the workload of a TOML file. Raises ConfigError naming `key in FILE`."""
    try:
        file = msgspec.convert(read_toml(path), WorkloadFile, dec_hook=read_special)
    except msgspec.ValidationError as exc:
        raise _workload_error(str(exc), path) from None
    if file.arrivals:
        own_rates = file.arrivals.partition(":")[0].strip() in OWN_RATES
        rate = None if own_rates else 1.0
        parse_arrivals(file.arrivals, rate_rps=rate, seed=0, place=f"arrivals in {path}")
    request = {k: v for k, v in msgspec.to_builtins(file.request).items() if v is not None and k != "extra"}
    if fixed := sorted({*SET_BY, *_REQUEST_FIELDS} & file.request.extra.keys()):
        by = SET_BY.get(fixed[0], f"request.{fixed[0]}")
        raise ConfigError(
            f"request.extra.{fixed[0]} in {path}",
            f"cannot be set in request.extra, because {by} sets it",
            "leave it out",
        )
    about = {
        "about": file.about or f"the workload of {path.name}",
        "source": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "request": {**REQUEST, **request, **file.request.extra},
        **({"arrivals": file.arrivals} if file.arrivals else {}),
    }
    contents: dict[str, ProseWriter] = {"words": ProseWords(), "code": Code(), "document": Document()}
    return ComposedWorkload(
        file.name or path.stem,
        as_lengths(file.input),
        as_lengths(file.output),
        contents.get(file.content.kind) or RandomIds(file.content.vocabulary),
        sharing=file.sharing,
        conversations=file.conversations,
        about=about,
    )


def _workload_error(text: str, path: Path) -> ConfigError:
    """Convert a message of msgspec (`problem - at `$.key``) to a ConfigError."""
    problem, _, at = text.partition(" - at `$")
    key = at.rstrip("`").lstrip(".")
    for pattern, problem_of in (
        (r"Object contains unknown field `(.*)`", "there is no such key"),
        (r"Object missing required field `(.*)`", "is missing"),
    ):
        if match := re.fullmatch(pattern, problem):
            key, problem = ".".join(filter(None, (key, match[1]))), problem_of
    return ConfigError(f"{key} in {path}" if key else str(path), problem, _HINT)
