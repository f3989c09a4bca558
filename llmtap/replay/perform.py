"""A plan carried out: bodies made, the server warmed up, the load sent and watched, and all of it told.

The order is that of seed 000, 4.5 and 5: nothing is made or read while requests are due, and what was sent to
warm up is in no figure.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import aiohttp

from llmtap.capture.run_writer import RunWriter
from llmtap.capture.schema import CaptureInfo
from llmtap.clock import SystemClock, WallAnchor
from llmtap.errors import ConfigError
from llmtap.load.bodies import BodyMaker, BodyOptions, server_of
from llmtap.load.crew import Crew, Outcome
from llmtap.load.messages import Progress, Setup
from llmtap.load.prepared import Prepared, prepare
from llmtap.load.sender import SenderOptions
from llmtap.load.target import parse_target
from llmtap.load.warmup import WarmUpOptions, warm_up
from llmtap.load.watch import Watch
from llmtap.record.asked import Asked, Turn
from llmtap.record.exchange import Exchange
from llmtap.record.outcome import TokenSource
from llmtap.replay.options import ReplayOptions
from llmtap.replay.plan import Plan
from llmtap.replay.result import result_of
from llmtap.units import NEVER
from llmtap.workload.requests import Requests

__all__ = ["Audience", "Replay"]

CONNECTIONS_MAX: Final = 1_000
"""Opened beforehand; more are opened when they are needed."""
HOLD_NS: Final = 2_000_000_000
"""How long an answer is taken to last where nobody knows, for guessing how many connections there will be."""


class Audience(Protocol):
    """Who is shown how far it is."""

    def preparing(self, done: int, of: int) -> None: ...

    def warming(self, how: str) -> None: ...

    def sending(self, progress: Progress, planned: int) -> None: ...

    def writing(self, done: int, of: int) -> None: ...


@dataclass(slots=True)
class Replay:
    """One replay. `stop` may be called from a signal handler at any time."""

    plan: Plan
    options: ReplayOptions
    body: BodyOptions
    audience: Audience
    notes: list[str] = field(default_factory=list)
    _crew: Crew | None = None
    _stopped: bool = False

    def stop(self) -> None:
        """Send no more and let answers end; the second time, don't wait for them."""
        self._stopped = True
        if self._crew is not None:
            self._crew.stop()

    async def run(self) -> dict[str, Any]:
        """The result, as public JSON. Raises ConfigError before anything is sent."""
        options = self.options
        writer_place = options.capture
        headers = [(name.encode(), value.encode()) for name, value in options.headers]
        parse_target(options.target, options.endpoint, headers)
        body = await self._served(self.body)
        maker = BodyMaker(body, decode=self.plan.decode)
        requests = self.plan.requests
        with prepare(requests, self.plan.prompts, maker, self.audience.preparing) as prepared:
            warmed = await self._warm_up(prepared)
            watch = Watch(
                SystemClock(), options.target, metrics=options.scrape if options.scrape != "none" else None
            )
            watch.start()
            anchor = WallAnchor.sample(SystemClock())
            with Crew(
                self._setup(prepared), requests, prepared.begins, prepared.ends,
                processes=options.processes, keep=True,
            ) as crew:  # fmt: skip
                self._crew = crew
                outcome = await crew.run(lambda p: self.audience.sending(p, len(requests)))
                series = await watch.close(outcome.began_ns)
                beside: dict[str, object] = {"warmup": warmed}
                tokens = _tokens(outcome)
                told = series.summary(from_ns=outcome.began_ns, to_ns=outcome.ended_ns, tokens=tokens)
                beside["system"] = {"summary": told, "series": series.to_dict()}
                beside["lengths"] = Lengths.of(
                    crew.exchanges(), requests, prepared.tokens, output_wanted=maker.output_exact
                ).describe()
                if writer_place is not None:
                    beside["capture"] = {"to": writer_place, "rows": self._write(crew, outcome, writer_place)}
        planned = array("q", (
            requests.arrival_ns[row]
            for row in range(len(requests))
            if not requests.after or requests.after[row] < 0
        ))  # fmt: skip
        plan = {
            **self.plan.describe(), "body": maker.describe(), "prompts": prepared.lengths.describe(),
            "target": _shown(options.target), "connections": "fresh" if options.fresh else "kept",
            "notes": [*self.plan.notes, *self.notes],
        }  # fmt: skip
        tls = urlsplit(options.target).scheme == "https"
        return result_of(
            outcome, plan=plan, planned_ns=() if options.closed else planned,
            closed=options.closed is not None, clock="mono" if tls else options.clock, anchor=anchor,
            beside=beside,
        )  # fmt: skip

    async def _served(self, body: BodyOptions) -> BodyOptions:
        """The model, and whose fields the server knows, as it says itself."""
        if body.model is not None and body.server != "auto":
            return body
        url = self.options.target.rstrip("/")
        url += "/models" if url.endswith("/v1") else "/v1/models"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
                session.get(url, headers=dict(self.options.headers)) as response,
            ):
                raw = await response.read() if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise ConfigError(
                "--target", f"{_shown(self.options.target)} cannot be reached: {type(exc).__name__}"
            ) from None
        found = server_of(raw)
        models = model_ids(raw)
        import msgspec

        if body.server == "auto" and found != "auto":
            body = msgspec.structs.replace(body, server=found)
        if body.model is None and self.plan.needs_model:
            if len(models) != 1:
                offered = f"the server offers {', '.join(models[:8])}" if models else "the server lists none"
                raise ConfigError("--model", f"is needed: {offered}")
            body = msgspec.structs.replace(body, model=models[0])
        return body

    def _setup(self, prepared: Prepared) -> Setup:
        options = self.options
        sender = SenderOptions(
            clock=options.clock, fresh=options.fresh, timeout=options.timeout,
            connect_timeout=options.connect_timeout, retries=options.retries,
        )  # fmt: skip
        return Setup(
            sender=sender, url=options.target, endpoint=options.endpoint, headers=options.headers,
            tenant_header=options.tenant_header, ca=options.ca, verify=not options.insecure,
            script_fd=-1, bodies_fd=prepared.fd, spill_fd=None, slots=options.closed,
            open=self._connections(), duration_ns=_or_never(options.duration),
            drain_ns=_or_never(options.drain), slo=options.slo, priority=options.realtime,
        )  # fmt: skip

    def _connections(self) -> int:
        options, requests = self.options, self.plan.requests
        if options.fresh:
            return 0
        if options.connections is not None:
            return options.connections
        if options.closed is not None:
            return min(options.closed, CONNECTIONS_MAX)
        # As many as there will be at once where each answer takes HOLD_NS: the first in each such time.
        arrivals, most, first = requests.arrival_ns, 0, 0
        for last, at_ns in enumerate(arrivals):
            while at_ns - arrivals[first] > HOLD_NS:
                first += 1
            most = max(most, last - first + 1)
        return min(most, CONNECTIONS_MAX)

    async def _warm_up(self, prepared: Prepared) -> dict[str, object]:
        kind = self.options.warmup
        if kind == "none":
            chosen = WarmUpOptions(cold=True)
        elif kind == "auto":
            chosen = WarmUpOptions()
        else:
            chosen = WarmUpOptions(requests=int(kind), tokens=0)
        self.audience.warming(kind)
        setup = self._setup(prepared)
        found = await warm_up(setup, self.plan.requests, prepared.begins, prepared.ends, chosen)
        return found.to_dict()

    def _write(self, crew: Crew, outcome: Outcome, place: str) -> int:
        """The capture; how many rows it has."""
        requests = self.plan.requests
        info = CaptureInfo(
            level="shape", block_unit="tokens" if requests.blocks else "",
            block_size=requests.block_tokens, blocks="trace" if requests.blocks else "salted",
        )  # fmt: skip
        opened = Counter(x.relay for _, x in crew.exchanges())
        writer = RunWriter(place, opened, info, meter="load")
        rows, of = 0, len(outcome.tally.sent_ns)
        for row, x in crew.exchanges():
            describe(x, row, requests)
            writer.add(x)
            rows += 1
            if rows % 500 == 0:
                self.audience.writing(rows, of)
        writer.close()
        return rows


@dataclass(slots=True)
class Lengths:
    """How long prompts and answers were by the server's own usage, beside what was asked for."""

    input_told: int = 0
    input_exact: int = 0
    input_off_max: int = 0
    """Tokens between the two, of the worst."""
    input_as_counted: int = 0
    """As long as we had counted them beforehand: a row may ask for less than a chat template takes."""
    output_told: int = 0
    output_exact: int = 0
    output_wanted: bool = False
    """The server was told to make answers of exactly this length."""

    @classmethod
    def of(
        cls,
        exchanges: Iterable[tuple[int, Exchange]],
        requests: Requests,
        counted: Sequence[int],
        *,
        output_wanted: bool,
    ) -> "Lengths":
        told = cls(output_wanted=output_wanted)
        for row, x in exchanges:
            given, made = x.tokens.input, x.tokens.output
            if given is not None and requests.input[row]:
                told.input_told += 1
                told.input_exact += given == requests.input[row]
                told.input_as_counted += given == counted[row]
                told.input_off_max = max(told.input_off_max, abs(given - requests.input[row]))
            if made is not None and x.tokens.source is TokenSource.USAGE and requests.output[row]:
                told.output_told += 1
                told.output_exact += made == requests.output[row]
        return told

    def describe(self) -> dict[str, object]:
        return asdict(self)


def describe(x: Exchange, row: int, requests: Requests) -> None:
    """What the plan knows of an exchange: the shape of its prompt, and whose turn it was."""
    blocks = requests.blocks[row] if requests.blocks else ()
    asked = Asked(max_tokens=requests.output[row] or None, tokens=requests.input[row] or None)
    if blocks:
        asked.blocks = array("q", blocks)
        asked.block_size, asked.block_unit = requests.block_tokens, "tokens"
    x.asked = asked
    if requests.after:
        first, number = row, 0
        while requests.after[first] >= 0:
            first, number = requests.after[first], number + 1
        think_ns = requests.think_ns[row] if number else None
        x.turn = Turn(f"row-{first}", "explicit", number, think_ns=think_ns)


def model_ids(raw: bytes) -> list[str]:
    """The ids that `GET /v1/models` lists."""
    import msgspec

    class Model(msgspec.Struct):
        id: str = ""

    class Models(msgspec.Struct):
        data: list[Model] = []

    try:
        return [model.id for model in msgspec.json.decode(raw, type=Models).data if model.id]
    except (ValueError, RecursionError):
        return []


def _tokens(outcome: Outcome) -> int | None:
    tokens: Any = outcome.tally.summary.to_dict({}, 0)["tokens"]
    output: int | None = tokens["output"]
    return output


def _or_never(ns: int | None) -> int:
    return NEVER if ns is None else ns


def _shown(url: str) -> str:
    """The target without what may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "") + parts.path
