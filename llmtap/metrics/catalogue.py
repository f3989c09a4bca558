"""Catalogue of the metrics of an exchange (`METRICS`), one row for each.

To add a metric, add its row here, compute its field of `latency.Measured`, and add its formula to
DEFINITIONS.md. Summaries, `/metrics`, OTLP, experiments, the tables of `bench`, reports, and the dashboard
loop over the rows. If an exchange has several values of a metric (`pooled`), `summary.py` and the exposition
record them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from operator import attrgetter
from typing import Any, Final


class Unit(Enum):
    """Unit of a metric in public JSON."""

    SECONDS = "s"
    TOKENS = "tokens"
    SHARE = "share"


class Answers(Enum):
    """Kind of answers from which a summary computes the metric."""

    ALL = "all"
    ENDED_WELL = "ended well"
    STREAMS = "streams"


class Surface(Flag):
    """Tables and views that show a part of the metrics. The JSON of a summary has all metrics."""

    TABLE = auto()
    """The table of latencies on a terminal."""
    REPORT = auto()
    """The full table of a report."""
    FACTS = auto()
    """The figures of one exchange on the dashboard."""
    LIVE = auto()
    """The live feed of the dashboard."""
    EXPERIMENT = auto()
    """The comparison of arms."""
    COMPARISON = auto()
    """The comparison of two replays."""
    BENCH = auto()
    """The table of requests of `bench`, with a column for each metric."""


_NOWHERE: Final = Surface(0)
_EVERYWHERE: Final = ~_NOWHERE


@dataclass(frozen=True, slots=True)
class Family:
    """Histogram on `/metrics`, with the labels tenant, model and arm, and possibly `label` and `reading`.

    `edges`: kind of its bucket edges (`meter.histogram_edges`). Bounds of the objectives named in `exact_for`
    are added as edges, so that the share of requests within them is exact.
    """

    key: str
    name: str
    help: str
    edges: str
    """Name of the buckets' edges in the configuration: `ttft`, `gap` or `duration`."""
    exact_for: tuple[str, ...] = ()
    label: str | None = None
    """Name of the label that distinguishes the metrics of this histogram; None: it has only one metric."""
    reading: bool = True
    """Whether the histogram has the label `reading`, which separates inferred times from other times."""


TTFT: Final = Family(
    "ttft",
    "llmtap_time_to_first_token_seconds",
    "Submit to first token of a stream; kind=content: first content that is not blank, any: of any kind."
    " Select one kind: a stream counts once under each",
    "ttft",
    ("ttft", "ttft_any"),
    label="kind",
)
TTFB: Final = Family(
    "ttfb",
    "llmtap_time_to_first_byte_seconds",
    "Submit to first byte of the response's body",
    "ttft",
    ("ttfb",),
    reading=False,
)
FIRST_EVENT: Final = Family(
    "first_event",
    "llmtap_time_to_first_event_seconds",
    "Submit to the first event of a stream, a role or a keep-alive too",
    "ttft",
    reading=False,
)
CHUNK_GAP: Final = Family(
    "chunk_gap",
    "llmtap_inter_chunk_seconds",
    "Time between consecutive events that carry output",
    "gap",
    ("tbc_max", "tbc_p99"),
)
TOKEN_GAP: Final = Family(
    "token_gap",
    "llmtap_inter_token_seconds",
    "Inter-token latency; option=A: gaps between chunks, B: all tokens of a chunk arrive with it,"
    " B-even: a gap is spread over the tokens of its chunk (both where tokens per chunk are known),"
    " C: by the server's own clock (where it reports times). Select one option: a gap counts under each",
    "gap",
    ("tbc_max", "tbc_p99"),
    label="option",
)
TPOT: Final = Family(
    "tpot",
    "llmtap_time_per_output_token_seconds",
    "(last token - first token) / (output tokens - 1)",
    "gap",
    ("tpot",),
)
DURATION: Final = Family(
    "duration",
    "llmtap_request_duration_seconds",
    "Submit to last byte, of answers that ended well",
    "duration",
    ("e2e",),
    reading=False,
)
IDLE: Final = Family(
    "idle",
    "llmtap_user_idle_seconds",
    "User idle latency: how long a reader waits with nothing to read, from submit on",
    "ttft",
    ("user_idle",),
)
IDLE_READING: Final = Family(
    "idle_reading",
    "llmtap_user_idle_after_first_token_seconds",
    "The same from the first token on: TTFT is forgiven",
    "ttft",
    ("user_idle",),
)


@dataclass(frozen=True, slots=True)
class Otlp:
    """Name and description of a metric's histogram in OpenTelemetry."""

    name: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Declaration of a metric of an exchange: its names, its unit, and the views that show it."""

    name: str
    """Name in public JSON."""
    title: str
    """Name in tables."""
    answers: Answers = Answers.STREAMS
    """Kind of answers that have the metric."""
    unit: Unit = Unit.SECONDS
    pooled: bool = False
    """Whether an exchange's JSON omits the metric, because an exchange has several values of it, or because
    the metric needs objectives."""
    surfaces: Surface = _NOWHERE
    """Tables and views that show the metric."""
    family: Family | None = None
    label: str | None = None
    """Value of the label `Family.label` for this metric."""
    otlp: Otlp | None = None
    judged_as: str | None = None
    """Metric whose validity in a replay is also the validity of this one; None: this metric has its own
    verdict; empty: it is always valid."""

    @property
    def field(self) -> str:
        """Name of the field of `latency.Measured` with the values: in ns, or in the metric's unit."""
        return f"{self.name}_ns" if self.unit is Unit.SECONDS else self.name


_ALL: Final = Surface.TABLE | Surface.REPORT | Surface.FACTS
METRICS: Final = (
    Metric(
        name="ttft",
        title="TTFT",
        surfaces=_EVERYWHERE,
        family=TTFT,
        label="content",
        otlp=Otlp(
            "llmtap.time_to_first_token", "Request handed on to first content that is not blank, of a stream."
        ),
    ),
    Metric(
        name="ttft_any",
        title="TTFT, any token",
        surfaces=_ALL | Surface.EXPERIMENT | Surface.BENCH,
        family=TTFT,
        label="any",
    ),
    Metric(
        name="ttft_reasoning",
        title="TTFT, reasoning",
        surfaces=Surface.REPORT,
        family=TTFT,
        label="reasoning",
        judged_as="ttft_any",
    ),
    Metric(
        name="ttft_tool_call",
        title="TTFT, tool call",
        surfaces=Surface.REPORT,
        family=TTFT,
        label="tool",
        judged_as="ttft_any",
    ),
    Metric(name="first_event", title="first event", family=FIRST_EVENT),
    Metric(name="ttfb", title="TTFB", answers=Answers.ALL, surfaces=_ALL, family=TTFB),
    Metric(
        name="tbc",
        title="TBC",
        pooled=True,
        surfaces=Surface.TABLE | Surface.REPORT | Surface.LIVE | Surface.EXPERIMENT | Surface.COMPARISON,
        family=CHUNK_GAP,
        otlp=Otlp("llmtap.inter_chunk", "Time between consecutive events that carry output."),
    ),
    Metric(
        name="itl",
        title="ITL",
        pooled=True,
        surfaces=Surface.TABLE | Surface.REPORT | Surface.LIVE | Surface.EXPERIMENT | Surface.COMPARISON,
        family=TOKEN_GAP,
    ),
    Metric(
        name="itl_server",
        title="ITL, server",
        pooled=True,
        surfaces=Surface.REPORT,
        family=TOKEN_GAP,
        judged_as="",
    ),
    Metric(name="tpot", title="TPOT", surfaces=_EVERYWHERE, family=TPOT),
    Metric(name="e2e", title="E2E", answers=Answers.ENDED_WELL, surfaces=_EVERYWHERE, family=DURATION),
    Metric(
        name="user_idle",
        title="user idle",
        surfaces=_ALL | Surface.LIVE | Surface.EXPERIMENT,
        family=IDLE,
        otlp=Otlp(
            "llmtap.user_idle", "Time that a reader (attributes llmtap.reader.*) waits with nothing to read."
        ),
    ),
    Metric(
        name="user_idle_eq4",
        title="user idle, d_i = V i",
        surfaces=Surface.TABLE | Surface.REPORT,
        judged_as="user_idle",
    ),
    Metric(name="user_idle_from_first_token", title="user idle from the first token", family=IDLE_READING),
    Metric(name="tbc_max", title="longest pause", surfaces=_ALL | Surface.EXPERIMENT | Surface.COMPARISON),
    Metric(name="jitter", title="jitter", surfaces=_ALL | Surface.BENCH),
    Metric(
        name="fluidity_index_doc",
        title="fluidity index, document",
        unit=Unit.SHARE,
        pooled=True,
        surfaces=Surface.REPORT,
    ),
    Metric(
        name="fluidity_index_code",
        title="fluidity index, code",
        unit=Unit.SHARE,
        pooled=True,
        surfaces=Surface.REPORT,
    ),
    Metric(name="qoe_area_step", title="area ratio", unit=Unit.SHARE, pooled=True, surfaces=Surface.REPORT),
    Metric(
        name="smooth_benefit",
        title="smooth benefit, tokens",
        unit=Unit.TOKENS,
        surfaces=Surface.REPORT | Surface.FACTS | Surface.BENCH,
    ),
)
"""All metrics, in the order of tables."""
OF_AN_EXCHANGE: Final = tuple(metric for metric in METRICS if not metric.pooled)
"""Metrics of which an exchange has at most one value."""
FAMILIES: Final = tuple(dict.fromkeys(metric.family for metric in METRICS if metric.family is not None))


def shown_on(surface: Surface) -> tuple[Metric, ...]:
    """Return the metrics that this table or view shows, in the order of tables."""
    return tuple(metric for metric in METRICS if surface in metric.surfaces)


def values_of(metrics: tuple[Metric, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a fast function that returns the values of two or more metrics of a `latency.Measured`."""
    return attrgetter(*(metric.field for metric in metrics))
