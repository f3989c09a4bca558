"""Detect the type of a server, and the fields and endpoints that an exo benchmark can use with it.

`mode.py` calls `ask_served` before it sends anything, and gets an `ExoServed`. The benchmark needs responses
that ignore EOS and prompts that no cache has. exo has an endpoint for both, llama.cpp has a field for each;
vLLM, SGLang and the simulated engine have fields for the first. An exo cluster is also asked for its nodes
and, once a second, their power and load (`NodeMetrics`).

Source: exo-bench's methodology, "Bench Endpoint", "System Metrics"; exo's src/exo/api/types and
src/exo/shared/types; llama.cpp tools/server/README.md (`ignore_eos`, `cache_prompt`).
"""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import aiohttp
import msgspec

from llmtap.clock import Clock
from llmtap.errors import ConfigError
from llmtap.load.bodies import server_of
from llmtap.load.monitor.timeseries import Columns
from llmtap.load.replay.options import USER_AGENT
from llmtap.load.target import shown_url
from llmtap.net.listener import failure_said
from llmtap.net.server_metrics import MonitorSeries
from llmtap.units import NS_PER_S

Kind = Literal["auto", "openai", "vllm", "sglang", "llamacpp", "exo"]
KINDS: Final = ("auto", "openai", "vllm", "sglang", "llamacpp", "exo")
BENCH_PATH: Final = "/bench/chat/completions"
_OWNERS: Final[Mapping[str, Kind]] = {"exo": "exo", "llamacpp": "llamacpp"}
_SNAPSHOT: Final = ("nodeIdentities", "topology", "nodeMemory", "nodeSystem", "instances")
"""Members of exo's `/state` to keep; the others are tasks and events."""
_ASK_S: Final = 10.0
_NODES_MAX: Final = 64
_NODE_SERIES: Final[Mapping[str, tuple[str, MonitorSeries]]] = {
    "gpuUsage": ("gpu_usage", MonitorSeries("as told")),
    "temp": ("temperature", MonitorSeries("celsius")),
    "sysPower": ("power", MonitorSeries("watts")),
    "pcpuUsage": ("performance_cores", MonitorSeries("as told")),
    "ecpuUsage": ("efficiency_cores", MonitorSeries("as told")),
}
"""Members of a node in `nodeSystem`, with their name and unit in the result."""


class Placement(msgspec.Struct, frozen=True):
    """Distribution of a model over the nodes of an exo cluster; None for other servers."""

    sharding: str | None = None
    instance_meta: str | None = None
    nodes: int | None = None


class ExoServed(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    url: str
    """Without `/v1` at its end if the endpoint is not below it."""
    model: str
    endpoint: str = "chat.completions"
    stream: bool = True
    """False for exo, whose endpoint responds in one piece with its own timings."""
    fields: dict[str, msgspec.Raw] = {}
    bans_eos: str | None = None
    """Means by which EOS is ignored; None if there is none."""
    switches_cache: bool = False
    """Whether a field of the request switches the prefix cache."""
    owner: str | None = None
    """`owned_by` of the server's models."""
    listed: Any = None
    state: dict[str, Any] | None = None
    """Snapshot of exo's cluster; None for other servers."""
    placement: Placement = Placement()


class _Listed(msgspec.Struct):
    data: list[dict[str, Any]] = []


async def ask_served(
    target: str,
    headers: Sequence[tuple[str, str]],
    *,
    model: str | None,
    kind: Kind,
    use_prefix_cache: bool,
    tls: ssl.SSLContext | None = None,
    instance: str | None = None,
) -> ExoServed:
    """Ask the server for its type. Raises ConfigError that names `--target` or `--model`.

    `tls` replaces the system's trust. `instance`: id in exo; None: the first instance of the model.
    """
    url = target.rstrip("/")
    root = url.removesuffix("/v1")
    try:
        async with side_session(headers, tls) as session:
            raw = await _get(session, f"{root}/v1/models")
            models = _models(raw)
            owner = _owner(models)
            if kind == "auto":
                kind = _OWNERS.get((owner or "").lower()) or server_of(raw)
            named = _named(model, models)
            state = await _state(session, root) if kind == "exo" else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
        raise ConfigError("--target", f"{shown_url(root)} cannot be reached: {failure_said(exc)}") from None
    served = ExoServed(
        kind=kind, url=url, model=named, owner=owner, state=state,
        listed=next((entry for entry in models if entry.get("id") == named), None),
    )  # fmt: skip
    match kind:
        case "exo":
            return msgspec.structs.replace(
                served, url=root, endpoint=BENCH_PATH, stream=False, bans_eos="its benchmark endpoint",
                fields={"use_prefix_cache": _raw(use_prefix_cache)}, switches_cache=True,
                placement=placement_of((state or {}).get("instances"), named, instance),
            )  # fmt: skip
        case "llamacpp":
            return msgspec.structs.replace(
                served, bans_eos="ignore_eos", switches_cache=True,
                fields={"ignore_eos": _raw(True), "cache_prompt": _raw(use_prefix_cache)},
            )  # fmt: skip
        case "vllm" | "sglang":
            return msgspec.structs.replace(served, bans_eos="ignore_eos, min_tokens")
    return served


def placement_of(instances: Any, model: str, instance: str | None = None) -> Placement:
    """Return the placement of the instance, or of the first one of the model in exo's state."""
    for tagged in instances.values() if isinstance(instances, dict) else ():
        meta, inner = _untag(tagged)
        shards = inner.get("shardAssignments")
        if not isinstance(shards, dict) or shards.get("modelId") != model:
            continue
        if instance not in (None, inner.get("instanceId")):
            continue
        first = next(iter((shards.get("runnerToShard") or {}).values()), None)
        sharding, _ = _untag(first)
        nodes = shards.get("nodeToRunner")
        return Placement(
            sharding.removesuffix("ShardMetadata") or None, meta.removesuffix("Instance") or None,
            len(nodes) if isinstance(nodes, dict) else None,
        )  # fmt: skip
    return Placement()


class NodeMetrics:
    """Samples of power, temperature and load of the nodes of an exo cluster; failures do not end the run."""

    def __init__(
        self,
        clock: Clock,
        url: str,
        headers: Sequence[tuple[str, str]],
        *,
        tls: ssl.SSLContext | None = None,
        period_ns: int = NS_PER_S,
    ) -> None:
        self.columns: dict[str, Columns] = {}
        self.failed = 0
        self._clock = clock
        self._url = f"{url}/state/nodeSystem"
        self._headers = headers
        self._tls = tls
        self._period_ns = period_ns
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for columns in self.columns.values():
            columns.close()

    async def _run(self) -> None:
        async with side_session(self._headers, self._tls) as session:
            start_ns = self._clock.mono_ns()
            number = 0
            while True:
                began_ns = self._clock.mono_ns()
                try:
                    told = msgspec.json.decode(await _get(session, self._url))
                    ended_ns = self._clock.mono_ns()
                    self._add(told, (began_ns + ended_ns) // 2, ended_ns - began_ns)
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                    self.failed += 1
                now_ns = self._clock.mono_ns()
                # Samples whose time is over are skipped.
                number = max(number + 1, -(-(now_ns - start_ns) // self._period_ns))
                await asyncio.sleep((start_ns + number * self._period_ns - now_ns) / NS_PER_S)

    def _add(self, told: Any, t_ns: int, took_ns: int) -> None:
        for node, said in told.items() if isinstance(told, dict) else ():
            if node not in self.columns:
                if len(self.columns) >= _NODES_MAX:
                    continue
                self.columns[node] = Columns(dict(_NODE_SERIES.values()))
            values = {
                name: float(said[key])
                for key, (name, _) in _NODE_SERIES.items()
                if isinstance(said, dict) and isinstance(said.get(key), int | float)
            }
            self.columns[node].add(t_ns, took_ns, values)


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url) as response:
        return await response.read() if response.status == 200 else b""


async def _state(session: aiohttp.ClientSession, root: str) -> dict[str, Any] | None:
    try:
        told = msgspec.json.decode(await _get(session, f"{root}/state"))
    except ValueError:
        return None
    return {key: told[key] for key in _SNAPSHOT if key in told} if isinstance(told, dict) else None


def _models(raw: bytes) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(raw, type=_Listed).data
    except (ValueError, RecursionError):
        return []


def _owner(models: Sequence[Mapping[str, Any]]) -> str | None:
    owners = {str(entry.get("owned_by") or "") for entry in models}
    return owners.pop() or None if len(owners) == 1 else None


def _named(model: str | None, models: Sequence[Mapping[str, Any]]) -> str:
    if model is not None:
        return model
    ids = [str(entry["id"]) for entry in models if entry.get("id")]
    if len(ids) == 1:
        return ids[0]
    offered = f"the server offers {', '.join(ids[:8])}" if ids else "the server lists none"
    raise ConfigError("--model", f"is needed: {offered}")


def _untag(tagged: Any) -> tuple[str, dict[str, Any]]:
    """Return the only key of an object and its value."""
    if not isinstance(tagged, dict) or len(tagged) != 1:
        return "", {}
    ((tag, inner),) = tagged.items()
    return str(tag), inner if isinstance(inner, dict) else {}


def _raw(value: bool) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def side_session(headers: Sequence[tuple[str, str]], tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Return an HTTP session for requests beside the load, with llmtap's User-Agent."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_ASK_S), headers={**dict(headers), "User-Agent": USER_AGENT},
        connector=aiohttp.TCPConnector(ssl=tls or True),
    )  # fmt: skip
