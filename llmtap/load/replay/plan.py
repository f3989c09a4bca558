"""Make the plan of a replay: requests of a trace or of a workload with arrivals, and where prompts come from.

`make_plan` takes the wanted source and arrangement (`ReplayQuestion`) and returns a `ReplayPlan`, which
`perform.py` sends. `other_words` returns a plan with other prompts for the warm-up.

A trace has its own arrivals; a rate scales them, so bursts stay bursts, and `--arrivals` replaces them. A
workload has only lengths and needs a rate, an arrival process (default: Poisson) or a closed loop.
"""

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.load.bodies import Decode
from llmtap.load.replay.baseline import RecordedAnswer, recorded_of
from llmtap.traces.format import FormatError
from llmtap.traces.registry import by_name
from llmtap.units import NS_PER_S
from llmtap.workload.arrivals import FORMS, OWN_RATES, parse_arrivals
from llmtap.workload.lengths import lengths_told
from llmtap.workload.prompts.fitting import ElasticPrompts, RowPrompts
from llmtap.workload.prompts.prompt import Prompt, PromptSource
from llmtap.workload.prompts.tokenizer import OWN, TokenCounter, load_counter
from llmtap.workload.registry import is_workload, report_of, workload_named, workloads
from llmtap.workload.requests import Requests
from llmtap.workload.trace import load_trace
from llmtap.workload.trace_rows import NO_TIMES

REQUESTS: Final = 1_000
"""Default number of requests of a workload: p99 needs as many (IETF draft, 5.1.4.3)."""
AT_ONCE: Final = "at-once"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayQuestion:
    """Wanted part and arrangement of a source, as the options state."""

    source: str
    source_format: str | None = None
    requests: int | None = None
    rate_rps: float | None = None
    speed: float | None = None
    arrivals: str | None = None
    window_from_ns: int = 0
    window_for_ns: int | None = None
    share: float | None = None
    closed: bool = False
    tokenizer: str | None = None
    chat: bool = True
    seed: int = 42


@dataclass(slots=True)
class ReplayPlan:
    """Requests in the order of their arrivals from time 0, and their prompts."""

    requests: Requests
    prompts: PromptSource | None
    about: Mapping[str, object]
    notes: list[str] = field(default_factory=list)
    decode: Decode | None = None
    baseline: RecordedAnswer | None = None
    """Place of rows with answer times."""

    @property
    def needs_model(self) -> bool:
        """Whether some body has to be made."""
        return not self.requests.bodies or not all(self.requests.bodies)

    def describe(self) -> dict[str, object]:
        return dict(self.about)


def make_plan(asked: ReplayQuestion, progress: Callable[[int, int | None], None] | None = None) -> ReplayPlan:
    """Create the plan. Raises ConfigError naming the option or file at fault."""
    if asked.speed is not None and asked.rate_rps is not None:
        raise ConfigError("--speed", "cannot be combined with --rate")
    place = asked.source
    counter = load_counter(asked.tokenizer or OWN, chat=asked.chat, place="--tokenizer")
    if is_workload(place):
        return _of_workload(asked, counter)
    return _of_trace(asked, counter, progress)


def _of_workload(asked: ReplayQuestion, counter: TokenCounter) -> ReplayPlan:
    for option, value in (
        ("--speed", asked.speed), ("--from", asked.source_format),
        ("--window", asked.window_from_ns or asked.window_for_ns), ("--share", asked.share),
    ):  # fmt: skip
        if value:
            raise ConfigError(option, f"the workload {asked.source} has no times")
    workload = workload_named(asked.source, "TRACE")
    count = REQUESTS if asked.requests is None else asked.requests
    requests = workload.requests(count, asked.seed)
    if len(requests) == 0:
        raise ConfigError("TRACE", f"{asked.source} has no requests")
    told = report_of(workload, requests, asked.seed)
    arrivals: dict[str, Any] | None = None
    if asked.closed:
        _refuse_arrivals(asked)
    else:
        process = asked.arrivals or str(told.get("arrivals") or "poisson")
        arrivals = _arrange(requests, process, asked)
    source = workload.prompts(requests, asked.seed)
    prompts: PromptSource = source
    if hasattr(source, "sized"):
        prompts = ElasticPrompts(source, requests, counter)  # type: ignore[arg-type]
    about = {
        "workload": told, "arrivals": arrivals, "seed": asked.seed, "requests": len(requests),
        "tokenizer": _named(asked, counter),
    }  # fmt: skip
    return ReplayPlan(requests, prompts, about, [], counter.tokenizer.decode)


def _of_trace(
    asked: ReplayQuestion, counter: TokenCounter, progress: Callable[[int, int | None], None] | None
) -> ReplayPlan:
    place = asked.source
    if asked.source_format is not None:
        try:
            by_name(asked.source_format)
        except FormatError as exc:
            raise ConfigError("--from", str(exc)) from None
    own_times = asked.arrivals is None and not asked.closed
    if asked.closed:
        _refuse_arrivals(asked)
    windowed = asked.window_from_ns or asked.window_for_ns is not None or asked.share is not None
    try:
        trace = load_trace(
            place, count=None if windowed else asked.requests, source_format=asked.source_format,
            progress=progress, conversations=True, names=True, bodies=True,
            timed=own_times or bool(windowed), places=True,
        )  # fmt: skip
    except ConfigError as exc:
        if exc.hint is None and not Path(place).exists() and "://" not in place:
            raise ConfigError(place, exc.problem, f"or a workload: {', '.join(workloads())}") from None
        if exc.problem == NO_TIMES and own_times:
            hint = "say how they arrive: --arrivals poisson --rate R, or --closed N"
            raise ConfigError(place, exc.problem, hint) from None
        raise
    try:
        if asked.window_from_ns or asked.window_for_ns is not None:
            trace = trace.window(asked.window_from_ns, asked.window_for_ns)
    except ValueError as exc:
        raise ConfigError("--window", str(exc)) from None
    try:
        if asked.share is not None:
            trace = trace.thinned(asked.share, asked.seed)
    except ValueError as exc:
        raise ConfigError("--share", str(exc)) from None
    count = len(trace) if asked.requests is None else asked.requests
    scale = 1.0 if asked.speed is None else asked.speed
    own_rate = trace.first(count).rate_rps
    if own_times and asked.rate_rps is not None:
        if own_rate is None:
            raise ConfigError("--rate", "all rows arrive at once, so no scale gives a rate")
        scale = asked.rate_rps / own_rate
    try:
        requests = trace.requests_at(count=count, scale=scale, think_scale=scale if asked.speed else 1.0)
    except ValueError as exc:
        raise ConfigError("--requests", str(exc)) from None
    arrivals: dict[str, Any] | None = None
    if own_times:
        arrivals = {
            "arrivals": "recorded", "scale": scale, "speed": asked.speed, "recorded_rps": own_rate,
            "rate_rps": own_rate and own_rate * scale,
        }  # fmt: skip
    elif asked.arrivals is not None:
        arrivals = _arrange(requests, asked.arrivals, asked)
    # As workloads describe theirs (IETF draft, 4.3.1).
    given, made = (lengths_told(list(filter(None, column))) for column in (requests.input, requests.output))
    made = {**made, "control": "max_tokens"} if made else {}
    about = {
        "trace": Path(place).name if "://" not in place else place.rpartition("/")[2], "format": trace.format,
        "rows": len(trace), "rows_left_out": trace.left_out, "rows_estimated": trace.estimated,
        "requests": len(requests), "arrivals": arrivals, "seed": asked.seed,
        "conversations": sum(row < 0 for row in requests.after) if requests.after else None,
        "window_from": asked.window_from_ns / NS_PER_S,
        "window_for": None if asked.window_for_ns is None else asked.window_for_ns / NS_PER_S,
        "share": asked.share, "lengths": {"input": given, "output": made},
        "tokenizer": _named(asked, counter),
    }  # fmt: skip
    prompts = RowPrompts(requests, counter, seed=asked.seed)
    notes = list(trace.notes)
    if silent := 0 if any(requests.bodies) else requests.output.count(0):
        notes.append(
            f"{silent:,} of {len(requests):,} rows tell of no answer, as where a request failed: they are"
            " sent and ask for one token"
        )
    baseline = recorded_of(trace, place, count)
    if trace.answered and baseline is None:
        notes.append("the trace came through a pipe, which is read once: no comparison with what it tells")
    return ReplayPlan(requests, prompts, about, notes, counter.tokenizer.decode, baseline)


def _named(asked: ReplayQuestion, counter: TokenCounter) -> str | None:
    return None if asked.tokenizer is None else counter.tokenizer.name


def _arrange(requests: Requests, process: str, asked: ReplayQuestion) -> dict[str, Any]:
    """Set the arrivals of conversations' first requests; later turns get that of their first."""
    after = requests.after
    if process == AT_ONCE:
        if asked.rate_rps is not None:
            raise ConfigError("--rate", "all are to arrive at once")
        requests.arrival_ns = array("q", bytes(8 * len(requests)))
        return {"arrivals": AT_ONCE, "given": asked.arrivals, "rate_rps": None, "seed": asked.seed}
    _check_rate(process, asked)
    arrivals = parse_arrivals(process, rate_rps=asked.rate_rps, seed=asked.seed)
    firsts = sum(row < 0 for row in after) if after else len(requests)
    offsets = islice(arrivals, firsts)
    if not after:
        requests.arrival_ns = array("q", offsets)
    else:
        column = array("q")
        for row in after:
            column.append(next(offsets) if row < 0 else column[row])
        requests.arrival_ns = column
    return {**arrivals.describe(), "given": asked.arrivals}


def _check_rate(process: str, asked: ReplayQuestion) -> None:
    """Raise ConfigError of `--rate` if the process needs one and has none, or the reverse."""
    name = process.partition(":")[0].strip()
    if name in OWN_RATES and asked.rate_rps is not None:
        raise ConfigError("--rate", f"{name} arrivals name their rates themselves", "leave it out")
    if name in FORMS and name not in OWN_RATES and asked.rate_rps is None:
        why = f"{asked.source} is a workload, which has no times of its own"
        if asked.arrivals is not None:
            why = f"{name} arrivals need a mean rate"
        raise ConfigError("--rate", f"is missing: {why}", "such as --rate 4, or --closed 8 without a rate")


def _refuse_arrivals(asked: ReplayQuestion) -> None:
    for option, value in (
        ("--arrivals", asked.arrivals),
        ("--rate", asked.rate_rps),
        ("--speed", asked.speed),
    ):
        if value is not None:
            raise ConfigError(
                option, "in a closed loop nobody plans when requests are sent", "leave out --closed"
            )


ROWS_MAX: Final = 128
"""A warm-up has 100 requests (4.5.1); a longer one repeats them."""
LETTERS_MAX: Final = 20
"""Average letters of a word; longer ones mean text without spaces, which is reversed by letters."""
_WORD: Final = re.compile(r"\s*\S+")
"""With the space before it, which belongs to its token."""


def other_words(plan: ReplayPlan) -> ReplayPlan:
    """Return the first requests of a plan with the words of each prompt in reverse order, without turns.

    A server that caches prefixes would answer measured prompts from its cache, so a warm-up sends the same
    words in another order: the same length, within a token or so, but another beginning. A plan of recorded
    bodies is returned unchanged.
    """
    if plan.prompts is None:
        return plan
    given = plan.requests
    count = min(len(given), ROWS_MAX)
    requests = Requests(
        array("q", bytes(8 * count)), given.input[:count], given.output[:count],
        tenants=given.tenants[:count],
    )  # fmt: skip
    return ReplayPlan(requests, _Reversed(plan.prompts), {}, [], plan.decode)


@dataclass(frozen=True, slots=True)
class _Reversed:
    source: PromptSource

    def prompt(self, row: int) -> Prompt:
        prompt = self.source.prompt(row)
        return Prompt(
            text=_reversed(prompt.text), ids=prompt.ids[::-1], system=_reversed(prompt.system),
            history=tuple((role, _reversed(said)) for role, said in prompt.history),
        )  # fmt: skip


def _reversed(text: str) -> str:
    words = _WORD.findall(text)
    if len(text) > LETTERS_MAX * len(words):
        return text[::-1]
    words[:1] = [" " + first.lstrip() for first in words[:1]]
    return "".join(words[::-1]).lstrip()
