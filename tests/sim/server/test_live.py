"""The real driver says to the last ns what the virtual one says of the same arrivals, however late and
often it is asked; nobody who left is told anything; nothing is kept of who is gone."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtap.sim.engine import Engine, run_virtual
from llmtap.sim.model_options import Serving, ServingSetup, read_model_options, read_serving
from llmtap.sim.schedulers.registry import SCHEDULERS
from llmtap.sim.server.live import LiveEngine, Ticket, make_live_engine
from llmtap.sim.server.options import EngineOptions
from llmtap.units import NEVER
from llmtap.workload.requests import Requests

MS = 1_000_000
BATCHES = sorted(name for name, kind in SCHEDULERS.items() if not kind.iterates)
ITERATIONS = sorted(name for name, kind in SCHEDULERS.items() if kind.iterates)


@dataclass
class Received:
    """What a client of the engine is told; and, of the virtual driver, the same."""

    tokens: list[int] = field(default_factory=list)
    over_ns: int | None = None
    refused_ns: int | None = None

    def on_token(self, choice: int, at_ns: int) -> None:
        assert self.over_ns is None and self.refused_ns is None
        self.tokens.append(at_ns)

    def on_end(self, choice: int, at_ns: int) -> None:
        self.over_ns = at_ns

    def on_refused(self, at_ns: int) -> None:
        assert self.refused_ns is None
        self.refused_ns = at_ns


@dataclass
class Watch:
    """The virtual driver's."""

    whole: bool
    answers: dict[int, Received] = field(default_factory=dict)

    def on_ended(self, request: int, token_ns: Sequence[int], end_ns: int, *, served: bool) -> None:
        over_ns = end_ns if served and self.whole else None
        self.answers[request] = Received(list(token_ns), over_ns, None if served else end_ns)


@dataclass(frozen=True)
class Group:
    """Requests that arrive together."""

    accepted_ns: int
    waits_ns: int
    """With the input filter."""
    rows: list[tuple[int, int, tuple[int, ...]]]
    """Tokens of the prompt and of the output, and the blocks of the prompt."""


def options_of(scheduler: str, serving: dict[str, str], readings: dict[str, str]) -> EngineOptions:
    readings = {"bin_edges": "1,8,30", **readings}
    return EngineOptions(
        scheduler, ServingSetup(readings=read_model_options(readings), serving=read_serving(serving))
    )


def played(options: EngineOptions, groups: Sequence[Group], servers: int = 1) -> list[Received]:
    """What the virtual driver says, in the order in which requests arrive."""
    rows = sorted(
        (
            (group.accepted_ns + group.waits_ns, i, k, *row)
            for i, group in enumerate(groups)
            for k, row in enumerate(group.rows)
        ),
    )
    arrivals, given, made = (array("q", [row[i] for row in rows]) for i in (0, 3, 4))
    blocks = [row[5] for row in rows]
    requests = Requests(arrivals, given, made, array("q", made), blocks, options.block_tokens)
    watch = Watch(not options.iterates)
    engine = Engine(SCHEDULERS[options.scheduler].build(requests, options.setup), servers)
    run_virtual(requests, engine, servers=servers, watch=watch)
    return [watch.answers[i] for i in range(len(rows))]


def lived(
    options: EngineOptions, groups: Sequence[Group], looks: Sequence[int] = ()
) -> tuple[LiveEngine, list[Ticket]]:
    """What the real driver says when somebody looks at these times as well, in the same order."""
    live = make_live_engine(options, 0, lambda at_ns: None)
    tickets: list[Ticket] = []
    events = sorted([(group.accepted_ns, i) for i, group in enumerate(groups)] + [(t, -1) for t in looks])
    for now_ns, i in events:
        if i < 0:
            live.advance(now_ns)
            continue
        group = groups[i]
        query = [Ticket(Received(), 0, given, made, blocks) for given, made, blocks in group.rows]
        live.submit(now_ns, now_ns + group.waits_ns, query)
        tickets += query
    while live.next_ns < NEVER:
        live.advance(live.next_ns)
    return live, sorted(tickets, key=lambda ticket: ticket.number)


def messages(tickets: Sequence[Ticket]) -> list[Received]:
    found = []
    for ticket in tickets:
        assert isinstance(ticket.listener, Received)
        found.append(ticket.listener)
    return found


_BLOCKS = st.lists(st.integers(0, 1), max_size=6).map(
    lambda names: tuple(accumulate(names, lambda a, b: 2 * a + b + 2))
)
_ROWS = st.tuples(st.integers(0, 90), st.integers(1, 40), _BLOCKS).map(
    lambda row: (max(row[0], 16 * len(row[2])), row[1], row[2])
)
# Whole iterations apart now and then, so that arrivals meet the ends of iterations. No two groups arrive at
# one moment: whether the first is served before the second is known depends on when somebody looks then.
_GAPS = st.one_of(st.integers(1, 60 * MS), st.sampled_from([5_742_000, 2 * 5_742_000, 59_653_000]))
_GROUPS = st.lists(
    st.tuples(_GAPS, st.sampled_from([0, 0, 0, 20 * MS, 5_742_000]), st.lists(_ROWS, min_size=1, max_size=3)),
    min_size=1,
    max_size=14,
).map(
    lambda result: _apart(
        [
            Group(at, wait, rows)
            for at, (_, wait, rows) in zip(accumulate(g for g, _, _ in result), result, strict=True)
        ]
    )
)
_SERVING = st.fixed_dictionaries(
    {},
    optional={
        "seqs_max": st.sampled_from(["1", "2", "5"]),
        "tokens_max": st.sampled_from(["16", "100"]),
        "chunk": st.sampled_from(["16", "40"]),
        "kv_tokens": st.sampled_from(["144", "300"]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "prefix_cache": st.sampled_from(["true", "false"]),
        "prepone": st.sampled_from(["1", "3"]),
        "output_delay": st.sampled_from(["7ms", "30ms"]),
        "give_up": st.just("late"),
        "ttft": st.sampled_from(["10ms", "100ms"]),
        "tbt": st.sampled_from(["6ms", "20ms"]),
    },
)
_READINGS = st.fixed_dictionaries(
    {},
    optional={
        "bin_choice": st.sampled_from(["round-robin", "longest-queue", "oldest-head"]),
        "static_batch": st.sampled_from(["1", "3"]),
    },
)
_LOOKS = st.lists(st.integers(0, 900 * MS), max_size=20)


def _apart(groups: list[Group]) -> list[Group]:
    seen: set[int] = set()
    kept = []
    for group in groups:
        if (at_ns := group.accepted_ns + group.waits_ns) not in seen:
            seen.add(at_ns)
            kept.append(group)
    return kept


@given(_GROUPS, st.sampled_from(ITERATIONS), _SERVING, _READINGS, _LOOKS)
def test_iterations_in_real_time_are_those_in_virtual_time(
    groups: list[Group], scheduler: str, serving: dict[str, str], readings: dict[str, str], looks: list[int]
) -> None:
    options = options_of(scheduler, serving, readings)
    live, tickets = lived(options, groups, looks)
    assert messages(tickets) == played(options, groups)
    assert len(live) == 0


@given(_GROUPS, st.sampled_from(BATCHES), _READINGS, _LOOKS, st.integers(1, 3))
def test_whole_batches_in_real_time_are_those_in_virtual_time(
    groups: list[Group], scheduler: str, readings: dict[str, str], looks: list[int], servers: int
) -> None:
    chosen = options_of(scheduler, {}, readings)
    options = EngineOptions(scheduler, chosen.setup, servers)
    live, tickets = lived(options, groups, looks)
    assert messages(tickets) == played(options, groups, servers)
    assert len(live) == 0


@given(
    _GROUPS,
    st.sampled_from([*ITERATIONS, *BATCHES]),
    _SERVING,
    _LOOKS,
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400 * MS)), max_size=9),
)
def test_who_left_is_told_nothing_and_all_others_are_served_to_the_end(
    groups: list[Group],
    scheduler: str,
    serving: dict[str, str],
    looks: list[int],
    leaves: list[tuple[int, int]],
) -> None:
    live = make_live_engine(options_of(scheduler, serving, {}), 0, lambda at_ns: None)
    tickets: list[Ticket] = []
    result: list[Received] = []
    left: dict[int, int] = {}
    events = sorted(
        [(group.accepted_ns, 0, i) for i, group in enumerate(groups)]
        + [(t, 1, -1) for t in looks]
        + [(t, 2, i) for i, t in leaves]
    )
    for now_ns, kind, i in events:
        if kind == 0:
            query = [Ticket(Received(), 0, *row) for row in groups[i].rows]
            live.submit(now_ns, now_ns + groups[i].waits_ns, query)
            tickets += query
            result += messages(query)
        elif kind == 1:
            live.advance(now_ns)
        elif i < len(tickets):
            live.leave(now_ns, [tickets[i]])
            left.setdefault(i, now_ns)
    while live.next_ns < NEVER:
        live.advance(live.next_ns)
    assert len(live) == 0
    for i, (ticket, one) in enumerate(zip(tickets, result, strict=True)):
        if i in left:
            assert all(at_ns <= left[i] for at_ns in one.tokens)
        elif one.refused_ns is None:
            assert len(one.tokens) == ticket.output_tokens


@pytest.mark.parametrize("predictor", ["perfect", "prompt", "noisy"])
def test_predictions_are_those_of_the_predictor(predictor: str) -> None:
    setup = ServingSetup(readings=read_model_options({"predictor": predictor}), serving=Serving())
    found = []
    for seed in (1, 1, 2):
        live = make_live_engine(EngineOptions("shortest_predicted_first", setup), seed, lambda at_ns: None)
        tickets = [Ticket(Received(), 0, 611, 7) for _ in range(3)]
        live.submit(0, 0, tickets)
        found.append([ticket.predicted_tokens for ticket in tickets])
    assert found[0] == found[1]
    match predictor:
        case "perfect":
            assert found[0] == [7, 7, 7]
        case "prompt":
            assert found[0] == found[2] == [int(1.5 * 611**0.7)] * 3
        case _:
            assert len(set(found[0])) > 1 and found[0] != found[2]
