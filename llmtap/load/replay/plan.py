"""Make the plan of a replay: requests of a trace or of a workload with arrivals, and where prompts come from.

`make_plan` takes the source and the arrival process (`ScheduleOptions`) and returns a `ReplayPlan`, which
`perform.py` sends. `reverse_words` returns a plan with other prompts for the warm-up.

A trace has its own arrivals: a rate scales their gaps, so bursts stay bursts, and `--arrivals` replaces them.
A workload has only lengths and needs a rate, an arrival process (default: Poisson) or a closed loop.
"""

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from llmtap.errors import ConfigError
from llmtap.load.bodies import Decode
from llmtap.load.options import LoadPlan, ScheduleOptions
from llmtap.load.replay.baseline import RecordedAnswer, find_recorded_answers
from llmtap.load.sending import protocol_of
from llmtap.traces.format import FormatError
from llmtap.traces.registry import format_named
from llmtap.units import NS_PER_S
from llmtap.workload.arrivals import FORMS, OWN_RATES, parse_arrivals
from llmtap.workload.lengths import recorded_lengths
from llmtap.workload.prompts.fitting import ElasticPrompts, RowPrompts
from llmtap.workload.prompts.prompt import Prompt, PromptSource
from llmtap.workload.prompts.tokenizer import OWN, TokenCounter, load_counter
from llmtap.workload.registry import is_workload, report_of, workload_named, workload_texts
from llmtap.workload.requests import Requests
from llmtap.workload.trace import load_trace
from llmtap.workload.trace_rows import NO_TIMES, TraceParts

REQUESTS: Final = 1_000
"""Default number of requests of a workload: p99 needs this number (IETF draft, 5.1.4.3)."""
AT_ONCE: Final = "at-once"
_SET_ARRIVALS: Final = "set the arrivals: --arrivals poisson --rate R, or --closed N"


@dataclass(slots=True)
class ReplayPlan:
    """Requests in the order of their arrivals, with times from 0, and their prompts."""

    requests: Requests
    prompts: PromptSource | None
    about: dict[str, object]
    """Description of the plan for the result, as JSON."""
    notes: list[str] = field(default_factory=list)
    decode: Decode | None = None
    baseline: RecordedAnswer | None = None
    """Source of the recorded answers; None if there are none to compare with."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the workload sets in each body (`[request]`)."""

    @property
    def needs_model(self) -> bool:
        """Whether a body must be generated, or a body of a data set names no model."""
        bodies, paths = self.requests.bodies, self.requests.paths
        return not bodies or any(
            not (paths and paths[row]) and b'"model"' not in body for row, body in enumerate(bodies)
        )

    def describe(self) -> dict[str, object]:
        return dict(self.about)


def make_plan(
    schedule: ScheduleOptions,
    progress: Callable[[int, int | None], None] | None = None,
    *,
    tokenizer: str | None = None,
    chat: bool = True,
) -> ReplayPlan:
    """Create the plan. `tokenizer` counts the tokens of prompts; if `chat`, its chat template is included.

    Raises ConfigError naming the wrong option or file.
    """
    if schedule.speed is not None and schedule.rate is not None:
        raise ConfigError("--speed", "cannot be combined with --rate", "use only one of them")
    counter = load_counter(tokenizer or OWN, chat=chat, place="--tokenizer")
    name = None if tokenizer is None else counter.tokenizer.name
    make = _plan_of_workload if is_workload(schedule.source) else partial(_plan_of_trace, progress=progress)
    plan = make(schedule, counter)
    plan.about["tokenizer"] = name
    return plan


def plan_of(load: LoadPlan, progress: Callable[[int, int | None], None] | None = None) -> ReplayPlan:
    """Create the plan of a load. Raises ConfigError naming the wrong option or file."""
    chat = load.bodies.endpoint == "chat.completions" and protocol_of(load.target.url) == "http"
    return make_plan(load.schedule, progress, tokenizer=load.bodies.tokenizer, chat=chat)


def _plan_of_workload(schedule: ScheduleOptions, counter: TokenCounter) -> ReplayPlan:
    for option, value in (
        ("--speed", schedule.speed),
        ("--from", schedule.source_format),
        ("--window", schedule.window.is_part),
        ("--share", schedule.share),
    ):
        if value:
            raise ConfigError(
                option,
                f"has no effect on the workload {schedule.source}, which has no arrival times",
                f"leave out {option}",
            )
    workload = workload_named(schedule.source, "TRACE")
    count = REQUESTS if schedule.requests is None else schedule.requests
    requests = workload.requests(count, schedule.seed)
    if len(requests) == 0:
        raise ConfigError("TRACE", f"the workload {schedule.source} has no requests", "increase --requests")
    description = report_of(workload, requests, schedule.seed)
    arrivals: Mapping[str, object] | None = None
    if schedule.closed is not None:
        _refuse_arrivals(schedule)
    else:
        process = schedule.arrivals or str(description.get("arrivals") or "poisson")
        arrivals = _set_arrivals(requests, process, schedule)
    source = workload.prompts(requests, schedule.seed)
    prompts: PromptSource = source
    if hasattr(source, "sized"):
        prompts = ElasticPrompts(source, requests, counter)  # type: ignore[arg-type]
    about: dict[str, object] = {
        "workload": description,
        "arrivals": arrivals,
        "seed": schedule.seed,
        "requests": len(requests),
    }
    notes = [str(description["stand_in"])] if "stand_in" in description else []
    return ReplayPlan(
        requests, prompts, about, notes, counter.tokenizer.decode, settings=take_settings(description)
    )


def take_settings(workload: dict[str, Any]) -> dict[str, Any]:
    """Remove the `[request]` settings from the description of a workload, and return them.

    A result shows them in `plan.body`, with the other fields that were sent.
    """
    return {name: value for name, value in workload.pop("request").items() if name != "max_tokens"}


def _plan_of_trace(
    schedule: ScheduleOptions, counter: TokenCounter, progress: Callable[[int, int | None], None] | None
) -> ReplayPlan:
    place = schedule.source
    if schedule.source_format is not None:
        try:
            format_named(schedule.source_format)
        except FormatError as exc:
            raise ConfigError("--from", str(exc), "`llmtap convert --list` shows the formats") from None
    own_times = schedule.arrivals is None and schedule.closed is None
    if schedule.closed is not None:
        _refuse_arrivals(schedule)
    windowed = schedule.window.is_part or schedule.share is not None
    try:
        trace = load_trace(
            place,
            count=None if windowed else schedule.requests,
            source_format=schedule.source_format,
            progress=progress,
            parts=TraceParts(
                conversations=True, names=True, bodies=True, timed=own_times or windowed, row_numbers=True
            ),
        )
    except ConfigError as exc:
        if not Path(place).exists() and "://" not in place:
            raise ConfigError(
                place, exc.problem, f"give the path of a trace, or a workload: {', '.join(workload_texts())}"
            ) from None
        if exc.problem == NO_TIMES and own_times:
            raise ConfigError(place, exc.problem, _SET_ARRIVALS) from None
        raise
    try:
        if schedule.window.is_part:
            trace = trace.window(*schedule.window)
    except ValueError as exc:
        raise ConfigError("--window", str(exc), "choose a part that has rows") from None
    try:
        if schedule.share is not None:
            trace = trace.sample_conversations(schedule.share, schedule.seed)
    except ValueError as exc:
        raise ConfigError("--share", str(exc), "such as --share 0.5") from None
    count = len(trace) if schedule.requests is None else schedule.requests
    scale = 1.0 if schedule.speed is None else schedule.speed
    own_rate = trace.first_rows(count).rate_rps
    if own_times and schedule.rate is not None:
        if own_rate is None:
            problem = "all rows of the trace arrive at once, so the rate cannot be changed"
            raise ConfigError("--rate", problem, "add --arrivals poisson, or leave out --rate")
        scale = schedule.rate / own_rate
    try:
        requests = trace.requests_at(
            count=count, scale=scale, think_scale=scale if schedule.speed else 1.0, timed=own_times
        )
    except ValueError as exc:
        raise ConfigError("--requests", str(exc), _SET_ARRIVALS) from None
    arrivals: Mapping[str, object] | None = None
    if own_times:
        arrivals = {
            "arrivals": "recorded",
            "scale": scale,
            "speed": schedule.speed,
            "recorded_rps": own_rate,
            "rate_rps": own_rate and own_rate * scale,
        }
    elif schedule.arrivals is not None:
        arrivals = _set_arrivals(requests, schedule.arrivals, schedule)
    # Describe the lengths in the form that a workload's lengths have (IETF draft, 4.3.1).
    input_lengths, output_lengths = (
        recorded_lengths([*filter(None, column)]) for column in (requests.input, requests.output)
    )
    about: dict[str, object] = {
        "trace": Path(place).name if "://" not in place else place.rpartition("/")[2],
        "format": trace.format,
        "rows": len(trace),
        "rows_left_out": trace.omitted_count,
        "rows_unsendable": trace.unsendable,
        "rows_estimated": trace.estimated_count,
        "requests": len(requests),
        "arrivals": arrivals,
        "seed": schedule.seed,
        "conversations": sum(row < 0 for row in requests.after) if requests.after else None,
        "window_from": schedule.window.from_ns / NS_PER_S,
        "window_for": None if schedule.window.for_ns is None else schedule.window.for_ns / NS_PER_S,
        "share": schedule.share,
        "lengths": {"input": input_lengths, "output": output_lengths},
    }
    prompts = RowPrompts(requests, counter, seed=schedule.seed)
    notes = list(trace.notes)
    if unanswered := 0 if any(requests.bodies) else requests.output.count(0):
        notes.append(
            f"{unanswered:,} of {len(requests):,} rows have no answer, for example after a failed request:"
            " they are sent and request one token"
        )
    baseline = find_recorded_answers(trace, place, count)
    if trace.has_answer_times and baseline is None:
        notes.append("no comparison with the recorded answers: the trace is a pipe, which is read only once")
    return ReplayPlan(requests, prompts, about, notes, counter.tokenizer.decode, baseline)


def _set_arrivals(requests: Requests, process: str, schedule: ScheduleOptions) -> Mapping[str, object]:
    """Replace the arrivals of the first request of each conversation; its later turns get the same time."""
    after = requests.after
    if process == AT_ONCE:
        if schedule.rate is not None:
            raise ConfigError("--rate", f"cannot be combined with --arrivals {AT_ONCE}", "leave out --rate")
        requests.arrival_ns = array("q", bytes(8 * len(requests)))
        return {"arrivals": AT_ONCE, "given": schedule.arrivals, "rate_rps": None, "seed": schedule.seed}
    _check_rate(process, schedule)
    arrivals = parse_arrivals(process, rate_rps=schedule.rate, seed=schedule.seed)
    firsts = sum(row < 0 for row in after) if after else len(requests)
    offsets = islice(arrivals, firsts)
    if not after:
        requests.arrival_ns = array("q", offsets)
    else:
        column = array("q")
        for row in after:
            column.append(next(offsets) if row < 0 else column[row])
        requests.arrival_ns = column
    return {**arrivals.describe(), "given": schedule.arrivals}


def _check_rate(process: str, schedule: ScheduleOptions) -> None:
    """Raise ConfigError for `--rate` if it is missing but needed, or given but not used by the process."""
    name = process.partition(":")[0].strip()
    if name in OWN_RATES and schedule.rate is not None:
        problem = f"cannot be combined with {name} arrivals, which contain their own rates"
        raise ConfigError("--rate", problem, "leave out --rate")
    if name in FORMS and name not in OWN_RATES and schedule.rate is None:
        reason = f"{schedule.source} is a workload, which has no times of its own"
        if schedule.arrivals is not None:
            reason = f"{name} arrivals need a mean rate"
        raise ConfigError("--rate", f"is missing: {reason}", "such as --rate 4, or --closed 8 without a rate")


def _refuse_arrivals(schedule: ScheduleOptions) -> None:
    """Raise ConfigError if an option sets send times, which `--closed` does not have."""
    for option, value in (
        ("--arrivals", schedule.arrivals),
        ("--rate", schedule.rate),
        ("--speed", schedule.speed),
    ):
        if value is not None:
            raise ConfigError(
                option, "cannot be used with --closed, which has no send times", f"leave out {option}"
            )


ROWS_MAX: Final = 128
"""Maximum number of rows for a warm-up of 100 requests (IETF draft, 4.5.1). A longer one repeats rows."""
LETTERS_MAX: Final = 20
"""Largest average number of letters in a word. If words are longer, the text has no spaces, and its letters
are reversed instead of its words."""
_WORD: Final = re.compile(r"\s*\S+")
"""A word with the space before it, because tokenizers put both into one token."""


def reverse_words(plan: ReplayPlan) -> ReplayPlan:
    """Return the first requests of a plan with the words of each prompt in reverse order, for the warm-up.

    If the warm-up sent the prompts that are measured later, a server with a prefix cache would answer these
    from its cache. In reverse order a prompt has the same length, within about a token, but another
    beginning. Recorded bodies stay unchanged. The requests are independent: turns of conversations do not
    wait.
    """
    planned = plan.requests
    count = min(len(planned), ROWS_MAX)
    requests = Requests(
        array("q", bytes(8 * count)),
        planned.input[:count],
        planned.output[:count],
        tenants=planned.tenants[:count],
        bodies=planned.bodies[:count],
        paths=planned.paths[:count],
    )
    prompts = None if plan.prompts is None else _ReversedPrompts(plan.prompts)
    return ReplayPlan(requests, prompts, {}, [], plan.decode)


@dataclass(frozen=True, slots=True)
class _ReversedPrompts:
    """Prompts with their words in reverse order, so that the server has no prefix of them in its cache."""

    source: PromptSource

    def prompt(self, row: int) -> Prompt:
        prompt = self.source.prompt(row)
        return Prompt(
            text=_reversed_text(prompt.text),
            ids=prompt.ids[::-1],
            system=_reversed_text(prompt.system),
            history=tuple((role, _reversed_text(content)) for role, content in prompt.history),
        )


def _reversed_text(text: str) -> str:
    words = _WORD.findall(text)
    if len(text) > LETTERS_MAX * len(words):
        return text[::-1]
    words[:1] = [" " + first.lstrip() for first in words[:1]]
    return "".join(words[::-1]).lstrip()
