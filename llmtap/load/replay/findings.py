"""Findings on a replay: problems that limit the validity of its figures, from its result as public JSON.

A load generator that is too slow measures its own delays instead of the server. `findings` returns
`Finding`s, the most serious first; each names its value, limit and remedy, and the figures that it makes
invalid or doubtful. `check_gaps` names the checks that were not possible. The functions are pure;
`verdict.py` makes one verdict of the findings. A limit is llmtap's own choice unless a document is named.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from msgspec import Struct, field

from llmtap.gates.figures import bounded_figures
from llmtap.load.host_limits import HOST_LIMITS
from llmtap.load.run import TIME_UP
from llmtap.metrics.catalogue import Answers, Surface, Unit, shown_on
from llmtap.metrics.histogram import Histogram
from llmtap.metrics.latency import SPREAD_NS
from llmtap.report.values import at
from llmtap.units import NS_PER_S, SHARE_OF_MIN, format_share

LIMITS: Final = {
    "lateness_p99": 0.002,
    "lateness_of_ttft": 0.05,
    "lateness_most": 0.02,
    "rate_share": 0.995,
    "rate_missing": 3,
    "cpu_share": 0.85,
    "uncertainty_of_ttft": 0.1,
    "uncertainty_of_tbc": 1.0,
    "error_seen": 0.001,
    "error_seen_share": 0.01,
    "failed_share": 0.0,
    "clocks": 0.010,
    "prompt_tokens": 0.01,
    "prompt_tokens_most": 0.10,
}
"""Limits of the findings. Lateness: p99 of the dispatch lateness in seconds, or as a share of the TTFT p50:
the larger limit counts, but at most `lateness_most`. Rate: sent / planned in the time of the plan, if
`rate_missing` or more requests are missing. CPU: share of one CPU that a sending process uses. Uncertainty:
share of the TTFT p50 or the E2E p50 for the first token, and of the time between chunks or per token
(`_chunk_error_limit`) for the other tokens. An error of `error_seen` seconds, or of `error_seen_share` of the
p50, makes a figure doubtful. Clocks: seconds between sending hosts (IETF 4.7.2). Prompt tokens: sum of the
absolute differences between the server's and llmtap's counts, as a share of llmtap's sum. Up to the first
limit, a token at the start of a prompt or in the template explains the difference; beyond the second, the
prompts that the server processed were not those that were planned."""

CAUTION_SHARE: Final = 0.07
"""If at most this share of the timestamps or requests is late, figures are only doubtful (a caution)."""
CPU_SECONDS_MIN: Final = 5.0
"""Minimum length of a run for a finding about CPU usage: in a shorter run, the sender's start dominates."""
_RETRIABLE_STATUSES: Final = frozenset({408, 425, 429})
"""4xx statuses that do not mean a wrong request: it was too slow, too early, or one of too many."""
_MERGED: Final = "several chunks may have got one timestamp"
_UNLIMITED: Final = (
    "whether several chunks got one timestamp: the chunks of an answer come in one read, so that neither the"
    " TBC p50 nor the TPOT p50 gives a limit"
)

SPACING: Final = ("tbc", "itl", "tbc_max", "jitter")
"""Figures of the times between chunks or tokens."""
STREAMED: Final = (
    *(
        metric.name
        for metric in shown_on(Surface.REPORT)
        if metric.answers is Answers.STREAMS and metric.unit is Unit.SECONDS and metric.judged_as is None
    ),
    "smooth_goodput",
)
"""Figures that only streamed answers have."""
LATENCIES: Final = (*STREAMED, "ttfb", "e2e", "goodput")
TOKENS: Final = ("tpot", "tokens", "smooth_goodput")
"""Figures that need the number of output tokens."""
FROM_SCHEDULE: Final = ("ttft_scheduled", "e2e_scheduled", "user_idle_scheduled")
LOAD: Final = ("load", *FROM_SCHEDULE)
"""The rates of the load, and the latencies that count from the scheduled time."""
FIGURES: Final = (*LOAD, *LATENCIES, "tokens", "input_tokens")
"""Names of all figures that the verdict judges, as in `verdict.figures`."""
REQUESTED: Final = frozenset({"load", "ttft", "ttft_any", "tpot", "e2e", "tokens", "goodput"})
"""Figures that every replay must measure. A result without one of them, or of its objectives, is invalid."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or fact that limits the validity of figures."""

    kind: str
    """Code of the problem, such as `lost`."""
    figure: float
    """Measured value, which is beyond `limit`."""
    limit: float
    """Value up to which there is no finding."""
    text: str
    """Problem, and its remedy if there is one, in one sentence."""
    invalid_figures: tuple[str, ...] = ()
    """Names of the figures that this finding makes invalid; `doubtful_figures`: those it makes doubtful."""
    doubtful_figures: tuple[str, ...] = ()
    """Names of the figures that this finding makes doubtful."""
    error: float | None = None
    """Largest possible error of these figures in seconds, if known."""
    share: float | None = None
    """Share of the requests or exchanges that have a timestamp or dispatch beyond the limit."""
    failed: bool = False
    """Whether the load failed, so that no figure counts."""
    partial: bool = False
    """Whether only a part of the requested load was sent."""

    def invalidates(self, requested: Collection[str] = REQUESTED) -> bool:
        """Whether this finding makes the result invalid: a failed load, or an invalid requested figure."""
        return self.failed or any(name in requested for name in self.invalid_figures)

    def to_judged(self, requested: Collection[str] = REQUESTED) -> "JudgedFinding":
        return JudgedFinding(**asdict(self), invalidates=self.invalidates(requested))


class JudgedFinding(Struct, frozen=True):
    """A `Finding` as public JSON of a verdict."""

    kind: str = field(name="what")
    """Code of the problem, such as `lost`."""
    figure: float
    """Measured value, which is beyond `limit`."""
    limit: float
    """Value up to which there is no finding."""
    text: str = field(name="says")
    """Sentence that describes the finding."""
    invalid_figures: tuple[str, ...] = field(name="spoils")
    """Names of the figures that this finding makes invalid."""
    doubtful_figures: tuple[str, ...] = field(name="doubts")
    """Names of the figures that this finding makes doubtful."""
    error: float | None
    """Largest possible error of these figures in seconds, if known."""
    share: float | None
    """Share of the requests or exchanges with a timestamp or dispatch beyond the limit."""
    failed: bool
    """Whether the load failed, so that no figure counts."""
    partial: bool
    """Whether only a part of the requested load was sent."""
    invalidates: bool
    """Whether the finding makes the result invalid (`Finding.invalidates`)."""


def findings(
    result: Mapping[str, Any],
    *,
    lateness: Histogram | None = None,
    uncertainties: Histogram | None = None,
    ttft_uncertainties: Histogram | None = None,
) -> list[Finding]:
    """Return the findings of a result, the most serious first.

    The histograms contain all values, in ns, of the result's `dispatch_lateness`, `uncertainties` and
    `ttft_uncertainties`.
    """
    rules = (
        _find_lost_results,
        _find_unplanned_rows,
        _find_missing_output,
        _find_chunk_counts,
        partial(_find_late_sends, values=lateness),
        _find_unsent_requests,
        _find_busy_sender,
        partial(_find_unsure_first_tokens, values=ttft_uncertainties),
        partial(_find_unsure_timestamps, values=uncertainties),
        _find_host_limits,
        _find_failed_requests,
        _find_clock_errors,
        _find_miscounted_tokens,
    )
    return [finding for rule in rules for finding in rule(result)]


def _find_lost_results(result: Mapping[str, Any]) -> Iterator[Finding]:
    lost = len(result["sender"]["lost"])
    if lost:
        died, they = ("1 sending process", "it") if lost == 1 else (f"{lost} sending processes", "they")
        yield Finding("lost", lost, 0, f"{died} died: what {they} sent is in no figure", FIGURES, failed=True)
    unread = result.get("unread") or 0
    if unread:
        n = (result.get("outcomes") or {}).values()
        yield Finding(
            "unread",
            unread,
            0,
            f"the exchanges of {unread:,} of {sum(n):,} requests did not come from the sending processes:"
            " they are in the latencies and outcomes, and not in the lengths, the timeline or a capture",
            ("load", "input_tokens"),
        )


def _find_unplanned_rows(result: Mapping[str, Any]) -> Iterator[Finding]:
    plan = result.get("plan") or {}
    left, rows = plan.get("rows_left_out") or 0, plan.get("rows") or 0
    if left:
        yield Finding(
            "left_out",
            left / (left + rows),
            0,
            f"{left:,} of the trace's {left + rows:,} rows ({left / (left + rows):.1%}) were left out: they"
            " have no arrival time, or neither a token count nor a size of the prompt",
            partial=True,
        )
    load = result["load"]
    # A generated plan is longer than the duration that the user set, so unsent rows at its end are intended.
    as_set = load.get("stopped") == TIME_UP and "trace" not in plan
    if load.get("stopped") and load.get("unsent") and not as_set:
        unsent = _part_text(load["unsent"], load["planned"], "planned requests")
        why = load.get("stop_condition") or "it was stopped"
        yield Finding(
            "stopped", load["unsent"] / load["planned"], 0, f"{unsent} were not sent: {why}", partial=True
        )
    if estimated := plan.get("rows_estimated") or 0:
        yield Finding(
            "estimated",
            estimated / rows,
            0,
            f"{_part_text(estimated, rows, 'rows')} of the trace have no token count: the lengths of prompts"
            " and answers are estimated, so compare latencies with the original only roughly",
            doubtful_figures=("input_tokens",),
            share=estimated / rows,
        )


_KINDS: Final = {
    "reasoning_only": "reasoning",
    "tool_call_only": "tool calls",
    "refusal_only": "refusals",
}


def _find_missing_output(result: Mapping[str, Any]) -> Iterator[Finding]:
    """Find answers without output, without content, or in one piece.

    Skip requests that generate no text, such as embeddings: their answers never have output.
    """
    body = (result.get("plan") or {}).get("body") or {}
    answers = result.get("answers") or {}
    n = answers.get("n", 0)
    if not n or body.get("stream") is None:
        return
    whole_answers = ("ttfb", "e2e", "e2e_scheduled", "goodput")
    if not answers["output"]:
        yield Finding(
            "no_tokens",
            n,
            0,
            f"{n:,} answers ended well and none brought a token: is it an LLM server that answers?",
            (*STREAMED, "tokens", *whole_answers),
        )
        return
    if silent := answers.get("silent", 0):
        grave = silent / n > CAUTION_SHARE
        yield Finding(
            "silent",
            silent / n,
            0,
            f"{_part_text(silent, n, 'answers')} ended well without any output: E2E, TTFB and goodput count"
            " them as answers",
            whole_answers if grave else (),
            () if grave else whole_answers,
            share=silent / n,
        )
    if without := answers["output"] - answers["content"]:
        kinds = ", ".join(f"{name} {answers[key]:,}" for key, name in _KINDS.items() if answers[key])
        yield Finding(
            "no_content",
            without / n,
            0,
            f"{_part_text(without, n, 'answers')} have output and no content{f' ({kinds})' if kinds else ''}:"
            " TTFT is of the others, and TTFT-any, to the first token of any kind, is of all",
            doubtful_figures=("ttft",),
            share=without / n,
        )
    if body["stream"] and (whole := n - answers["streamed"]):
        yield Finding(
            "whole",
            whole / n,
            0,
            f"{_part_text(whole, n, 'answers')} came in one piece although a stream was requested: TTFT, TPOT"
            " and the times between tokens are of the others",
            share=whole / n,
        )


def _find_chunk_counts(result: Mapping[str, Any]) -> Iterator[Finding]:
    """Find answers whose output tokens are counted as chunks, although a chunk can contain several tokens."""
    # `answers` counts only answers that ended well. A failed answer has no usage, and `_find_failed_requests`
    # reports it.
    answers = result.get("answers") or {}
    n, counted = answers.get("by_chunks", 0), answers.get("output", 0)
    if not n:
        return
    bounds = bounded_figures(result)
    figures = (*TOKENS, "goodput") if "tpot" in bounds else TOKENS
    grave = n / counted > CAUTION_SHARE
    yield Finding(
        "by_chunks",
        n / counted,
        0,
        f"the output tokens of {_part_text(n, counted, 'answers')} are counted by chunks, because the server"
        " sent no usage: --tokenizer counts them",
        figures if grave else (),
        () if grave else figures,
        share=n / counted,
    )


def _find_late_sends(result: Mapping[str, Any], values: Histogram | None) -> Iterator[Finding]:
    lateness = result.get("dispatch_lateness") or {}
    p99, ttft = lateness.get("p99"), _median_ttft(result)
    if p99 is None:
        return
    by_ttft = min(LIMITS["lateness_most"], LIMITS["lateness_of_ttft"] * (ttft or 0))
    limit = max(LIMITS["lateness_p99"], by_ttft)
    if p99 > limit:
        beyond, share = _count_above(values, lateness["n"], limit)
        yield Finding(
            "dispatch_lateness",
            p99,
            limit,
            f"the p99 of the lateness of {lateness['n']:,} requests is {_ms_text(p99)}, and {beyond:,} of"
            f" them left later than {_ms_text(limit)}; send from a machine with free CPUs, or with more"
            " --processes",
            LOAD if share > CAUTION_SHARE else (),
            LATENCIES if share > CAUTION_SHARE else LOAD,
            error=p99,
            share=share,
        )


def _find_unsent_requests(result: Mapping[str, Any]) -> Iterator[Finding]:
    load = result["load"]
    share = load.get("sent_share")
    if share is None:
        return
    due, in_time = load["due"], load["in_time"]
    if share < LIMITS["rate_share"] and due - in_time >= LIMITS["rate_missing"]:
        yield Finding(
            "rate",
            share,
            LIMITS["rate_share"],
            f"{_part_text(in_time, due, 'requests')} that were planned until then had been sent when the plan"
            " ended",
            (*LOAD, *LATENCIES, "tokens"),
        )


def _find_busy_sender(result: Mapping[str, Any]) -> Iterator[Finding]:
    if result["window"]["seconds"] < CPU_SECONDS_MIN:
        return
    busiest = max((p["cpu_share"] for p in result["sender"]["processes"]), default=0.0)
    if busiest > LIMITS["cpu_share"]:
        yield Finding(
            "sender_cpu",
            busiest,
            LIMITS["cpu_share"],
            f"a sending process used {busiest:.0%} of a CPU: more --processes would say whether it held back",
            doubtful_figures=(*LOAD, *LATENCIES),
        )


def _find_unsure_timestamps(result: Mapping[str, Any], values: Histogram | None) -> Iterator[Finding]:
    """Find timestamps that several chunks possibly share.

    A kernel timestamp is correct even if the data is read late, but chunks that are read together share it.
    """
    p99, n = (at(result, "uncertainties", name) for name in ("p99", "n"))
    name, limit = _chunk_error_limit(result)
    if p99 is not None and limit and p99 > limit:
        beyond, of_all = _count_above(values, n, limit)
        grave = of_all > CAUTION_SHARE
        yield Finding(
            "uncertainty",
            p99,
            limit,
            f"{_MERGED}: the p99 of this error over {n:,} exchanges is {_ms_text(p99)}, and"
            f" {beyond:,} of them have one above {_ms_text(limit)}, the limit by the {name.upper()} p50;"
            " send from a machine with free CPUs",
            SPACING if grave else (),
            () if grave else SPACING,
            error=p99,
            share=of_all,
        )


def _find_unsure_first_tokens(result: Mapping[str, Any], values: Histogram | None) -> Iterator[Finding]:
    """Find timestamps of submissions or first tokens that are possibly too late.

    If the error is large enough to be visible in a figure, the figure is doubtful. If too many timestamps
    have a large error, the figure is invalid.
    """
    p99, n = (at(result, "ttft_uncertainties", name) for name in ("p99", "n"))
    ttft, e2e = _median_ttft(result), at(result, "metrics", "e2e", "p50")
    if p99 is None:
        return
    for name, p50, figures in (("ttft", ttft, _FIRST_TOKEN_FIGURES), ("e2e", e2e, ("e2e", "tpot"))):
        if not p50:
            continue
        seen = max(LIMITS["error_seen"], LIMITS["error_seen_share"] * p50)
        limit = max(LIMITS["error_seen"], LIMITS["uncertainty_of_ttft"] * p50)
        if p99 > seen:
            beyond, of_all = _count_above(values, n, limit)
            grave = of_all > CAUTION_SHARE
            yield Finding(
                f"{name}_uncertainty",
                p99,
                limit if grave else seen,
                f"a request or a first token may have a late stamp: the p99 of this error over {n:,}"
                f" exchanges is {_ms_text(p99)}, and {beyond:,} of them have one above {_ms_text(limit)}, the"
                f" limit by the {name.upper()} p50; send from a machine with free CPUs",
                figures if grave else (),
                () if grave else figures,
                error=p99,
                share=of_all,
            )


_FIRST_TOKEN_FIGURES: Final = (
    "ttft",
    "ttft_any",
    "ttfb",
    "user_idle",
    "goodput",
    "smooth_goodput",
    "ttft_scheduled",
    "user_idle_scheduled",
)
"""Figures that depend on the times of the submission and of the first token."""


def _chunk_error_limit(result: Mapping[str, Any]) -> tuple[str, float]:
    """Return the metric from which the limit of the uncertainty is computed, and this limit in seconds.

    The limit is 0 if the metric has no value. The metric is the time between chunks. If chunks come in
    bursts, most of these times are 0, and the metric is the time per token instead: the time between chunks
    as they were generated. So a server that sends text in bursts gets the same limit as one that does not.
    """
    gap, each = (at(result, "metrics", name, "p50") or 0.0 for name in ("tbc", "tpot"))
    spread = SPREAD_NS / NS_PER_S
    name, time = ("tpot", each) if gap <= spread < each else ("tbc", gap)
    return name, LIMITS["uncertainty_of_tbc"] * time


def check_gaps(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence, with the reason, for each check that was not possible."""
    streams = at(result, "metrics", "ttft", "n") and at(result, "uncertainties", "p99") is not None
    if streams and not _chunk_error_limit(result)[1]:
        return [_UNLIMITED]
    return []


def _find_host_limits(result: Mapping[str, Any]) -> Iterator[Finding]:
    """Find requests that failed because of a limit of this host, and not because of the server."""
    n = sum((result.get("outcomes") or {}).values())
    for error, remedy in HOST_LIMITS.items():
        if failed := (result.get("errors") or {}).get(error, 0):
            yield Finding(
                "host_limit",
                failed / n,
                0,
                f"{_part_text(failed, n, 'requests')} could not be sent ({error}): {remedy}",
                LOAD,
                LATENCIES,
                share=failed / n,
                failed=True,
            )


def _find_failed_requests(result: Mapping[str, Any]) -> Iterator[Finding]:
    outcomes = result.get("outcomes") or {}
    n = sum(outcomes.values())
    failed = n - sum(outcomes.get(name, 0) for name in _NOT_FAILED)
    if failed:
        why = ", ".join(f"{name} {k:,}" for name, k in outcomes.items() if name not in _NOT_FAILED)
        yield Finding(
            "failed",
            failed / n,
            LIMITS["failed_share"],
            f"{failed:,} of {n:,} requests did not end well ({why}): E2E is of the others; TTFT and gaps"
            f" are of all tokens that came{_wrong_requests_text(result)}",
            doubtful_figures=_WHOLE_ANSWER_FIGURES,
            share=failed / n,
            failed=True,
        )


_WHOLE_ANSWER_FIGURES: Final = ("ttft", "ttft_any", "e2e", "ttft_scheduled", "e2e_scheduled", "tokens")
"""Figures that exclude failed requests, so that failures can make them look better."""
_NOT_FAILED: Final = ("complete", "refused", "tap_error")
"""Outcomes that are not failures of the server. `tap_error` is a failure of llmtap or of this host, which
`_find_lost_results` and `_find_host_limits` report."""


def _wrong_requests_text(result: Mapping[str, Any]) -> str:
    """Return the part of the text about 4xx answers, which mean that the request is wrong, not the server."""
    blamed = {
        status: n
        for status, n in (result.get("error_statuses") or {}).items()
        if 400 <= int(status) < 500 and int(status) not in _RETRIABLE_STATUSES
    }
    if not blamed:
        return ""
    statuses = ", ".join(f"{status} ({n:,})" for status, n in blamed.items())
    return f"; {sum(blamed.values()):,} of them by answers that blame the request: status {statuses}"


def _find_clock_errors(result: Mapping[str, Any]) -> Iterator[Finding]:
    """Find clocks that possibly differ too much: comparing two clocks has an error of half a round trip."""
    others = [clock for clock in result["sender"].get("clocks") or () if not clock["shared"]]
    hosts = len({clock["host"] for clock in others})
    apart = max((clock["rtt"] / 2 for clock in others), default=0.0)
    if apart > LIMITS["clocks"]:
        yield Finding(
            "clocks",
            apart,
            LIMITS["clocks"],
            f"the clocks of other hosts ({hosts}) are known within {_ms_text(apart)},"
            " and IETF 4.7.2 asks for 10 ms: when they sent is no surer than that (latencies are: each is of"
            " one clock)",
            LOAD,
            error=apart,
        )


def _find_miscounted_tokens(result: Mapping[str, Any]) -> Iterator[Finding]:
    """Find prompts for which the server counted another number of tokens than expected.

    The server then has another tokenizer or chat template. Without `--tokenizer`, the expected counts are
    planned lengths. The prompts need not have exactly these lengths, so a difference is less serious.
    """
    lengths = result.get("lengths") or {}
    counted, usage = lengths.get("input_counted") or 0, lengths.get("input_usage") or 0
    if not counted:
        return
    share = lengths["input_apart"] / counted
    if share > LIMITS["prompt_tokens"]:
        named = (result.get("plan") or {}).get("tokenizer") is not None
        grave = named and share > LIMITS["prompt_tokens_most"]
        limit = LIMITS["prompt_tokens_most" if grave else "prompt_tokens"]
        few = counted < SHARE_OF_MIN
        difference = (
            f"{lengths['input_apart']:,} tokens" if few else format_share(lengths["input_apart"], counted)
        )
        yield Finding(
            "prompt_tokens",
            share,
            limit,
            f"the server counted {usage:,} prompt tokens, we {counted:,}: prompt by prompt {difference}"
            " apart; --tokenizer takes the folder of the server's model",
            (*LATENCIES, "input_tokens") if grave else (),
            () if grave else ("input_tokens",),
        )


def _count_above(values: Histogram | None, n: int, limit: float) -> tuple[int, float]:
    """Return the number and share of the `n` values above a limit in seconds; all `n` if `values` is None."""
    beyond = n if values is None else values.count_above(limit * NS_PER_S)
    return beyond, beyond / n


def _median_ttft(result: Mapping[str, Any]) -> float | None:
    """Return the p50 of TTFT, or of TTFT-any if no answer has content."""
    values = (at(result, "metrics", name, "p50") for name in ("ttft", "ttft_any"))
    return next((value for value in values if value is not None), None)


def _ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _part_text(k: int, n: int, things: str) -> str:
    """Format a part as `78 of 80 requests`, or for a large `n` as `97.51 % of the 12,000 requests`."""
    return f"{k:,} of {n:,} {things}" if n < SHARE_OF_MIN else f"{format_share(k, n)} of the {n:,} {things}"
