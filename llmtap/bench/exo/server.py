"""Detect the type of a server for an exo benchmark; place models on an exo cluster; sample power and memory.

`mode.py` calls `detect_server` before it sends anything, and gets an `ExoServer`. The benchmark needs
responses that ignore EOS, and prompts that are not in a cache. exo has an endpoint that provides both; vLLM,
SGLang and the simulated engine have request fields that ignore EOS. An exo cluster is also queried for its
nodes and, once a second, for their power and load (`NodeMetrics`). `Power` computes energy and peak memory
from these samples, or from the samples of this host.

`place` makes a new instance in the steps of exo-bench: request previews, download the model on each node,
create the instance, wait until its runners are ready. Of the previews that match the options
(`PlacementFilter`), it uses the last one in the order of instance type, sharding (both by name) and number of
nodes. Other instances stay.

Source: exo-bench's methodology, "Bench Endpoint", "System Metrics", "Reproducing Results"; exo's
src/exo/api/types, src/exo/shared/types and bench/harness.py.
"""

import asyncio
import contextlib
import ssl
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import aiohttp
import msgspec

from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.json_types import JsonObject
from llmtap.load.bodies import server_of
from llmtap.load.monitor.timeseries import Columns, Ticks
from llmtap.load.replay.options import USER_AGENT
from llmtap.load.sending import shown_url
from llmtap.metrics.cost import Energy, average_power_w, energy_of
from llmtap.net.bounded_body import read_at_most
from llmtap.net.listener import failure_text
from llmtap.net.server_metrics import MonitorSeries
from llmtap.units import NS_PER_S, to_seconds

Kind = Literal["auto", "openai", "vllm", "sglang", "exo"]
KINDS: Final = ("auto", "openai", "vllm", "sglang", "exo")
BENCH_PATH: Final = "/bench/chat/completions"
NODES_MAX: Final = 4
POLL_S: Final = 0.1
DOWNLOAD_POLL_S: Final = 1.0
_SNAPSHOT: Final = ("nodeIdentities", "topology", "nodeMemory", "nodeSystem", "instances")
"""Members of exo's `/state` that the result contains; the other members are tasks and events."""
_REQUEST_TIMEOUT_S: Final = 10.0
_NODES_SAMPLED_MAX: Final = 64
_NODE_SERIES: Final[Mapping[str, tuple[str, MonitorSeries]]] = {
    "gpuUsage": ("gpu_usage", MonitorSeries("as reported")),
    "temp": ("temperature", MonitorSeries("celsius")),
    "sysPower": ("power", MonitorSeries("watts")),
    "pcpuUsage": ("performance_cores", MonitorSeries("as reported")),
    "ecpuUsage": ("efficiency_cores", MonitorSeries("as reported")),
}
"""By member of a node in exo's `nodeSystem`: its name and unit in the result."""


class Placement(msgspec.Struct, frozen=True):
    """Distribution of a model over the nodes of an exo cluster; for other servers, all fields are None."""

    sharding: str | None = None
    """How the model is split among the nodes: by layers or by tensors."""
    instance_meta: str | None = None
    """Transport between the nodes."""
    nodes: int | None = None
    """Number of nodes that share the model."""


class ExoServer(msgspec.Struct, frozen=True, kw_only=True):
    """Server that is measured, as it was recognised."""

    kind: Kind
    url: str
    """URL of the server, without `/v1` at its end if the endpoint's path does not begin with `/v1`."""
    model: str
    endpoint: str = "chat.completions"
    stream: bool = True
    """Whether responses are streamed. exo's endpoint responds in one piece, with its own timings."""
    fields: dict[str, msgspec.Raw] = {}
    """JSON fields that each request body needs on this server."""
    eos_banned_by: str | None = None
    """Names of the request fields, or of the endpoint, that make the server ignore EOS; None: unknown."""
    has_cache_switch: bool = False
    """Whether a field of the request switches the prefix cache on or off."""
    owner: str | None = None
    """Value of `owned_by` in the server's `/v1/models`; None if it is missing or differs between models."""
    model_entry: Any = None
    """Entry of the model in the server's `/v1/models`; None if it is not listed."""
    state: JsonObject | None = None
    """Snapshot of the exo cluster before the run (`_SNAPSHOT`); None for other servers."""
    placement: Placement = Placement()


class _ModelList(msgspec.Struct):
    """Answer of the server to `GET /v1/models`."""

    data: list[JsonObject] = []


async def detect_server(
    target: str,
    headers: Sequence[tuple[str, str]],
    *,
    model: str | None,
    kind: Kind,
    use_prefix_cache: bool,
    tls: ssl.SSLContext | None = None,
    instance: str | None = None,
) -> ExoServer:
    """Query the server, and return its type and properties.

    `tls`: if None, the CAs of the system are trusted. `instance`: id of an instance in exo; None: the first
    instance of the model. Raises ConfigError if the server cannot be reached, or offers several models.
    """
    url = target.rstrip("/")
    root = url.removesuffix("/v1")
    try:
        async with side_session(headers, tls) as session:
            raw = await _get_body(session, f"{root}/v1/models")
            models = _decode_json(raw, _ModelList, _ModelList()).data
            owners = {str(entry.get("owned_by") or "") for entry in models}
            owner = owners.pop() or None if len(owners) == 1 else None
            if kind == "auto":
                kind = "exo" if (owner or "").lower() == "exo" else server_of(raw)
            model_name = model or _only_model(models)
            state = _decode_json(await _get_body(session, f"{root}/state"), dict, {}) if kind == "exo" else {}
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
        problem = f"{shown_url(root)} cannot be reached: {failure_text(exc)}"
        raise ConfigError(
            "--target", problem, "check that the server runs and that the URL is right"
        ) from None
    server = ExoServer(
        kind=kind,
        url=url,
        model=model_name,
        owner=owner,
        model_entry=next((entry for entry in models if entry.get("id") == model_name), None),
        eos_banned_by="ignore_eos, min_tokens" if kind in ("vllm", "sglang") else None,
    )
    if kind != "exo":
        return server
    return msgspec.structs.replace(
        server,
        url=root,
        endpoint=BENCH_PATH,
        stream=False,
        eos_banned_by="its benchmark endpoint",
        fields={"use_prefix_cache": msgspec.Raw(msgspec.json.encode(use_prefix_cache))},
        has_cache_switch=True,
        state={key: state[key] for key in _SNAPSHOT if key in state},
        placement=placement_of(state.get("instances"), model_name, instance),
    )


def _decode_json(raw: bytes, kind: Any, default: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError):
        return default


def _only_model(models: Sequence[Mapping[str, Any]]) -> str:
    ids = [str(entry["id"]) for entry in models if entry.get("id")]
    if len(ids) == 1:
        return ids[0]
    offered = f"the server offers {', '.join(ids[:8])}" if ids else "the server lists no models"
    raise ConfigError("--model", f"is required: {offered}", "set it to the name of the model to measure")


def placement_of(instances: Any, model: str, instance: str | None = None) -> Placement:
    """Return the placement of the instance with this id, or by default, of the model's first instance."""
    for tagged in instances.values() if isinstance(instances, dict) else ():
        meta, inner = _untag_variant(tagged)
        shards = _shards(tagged)
        if shards.get("modelId") == model and instance in (None, inner.get("instanceId")):
            sharding, _ = _untag_variant(next(iter((shards.get("runnerToShard") or {}).values()), None))
            return Placement(
                sharding.removesuffix("ShardMetadata") or None,
                meta.removesuffix("Instance") or None,
                len(shards.get("nodeToRunner") or ()) or None,
            )
    return Placement()


def _untag_variant(tagged: Any) -> tuple[str, Mapping[str, Any]]:
    """Return tag and content of a variant. exo encodes it as an object with one member: `{tag: content}`."""
    if not isinstance(tagged, dict) or len(tagged) != 1:
        return "", {}
    ((tag, inner),) = tagged.items()
    return str(tag), inner if isinstance(inner, dict) else {}


def _shards(instance: Any) -> Mapping[str, Any]:
    """Return which node of the cluster holds which part of the model."""
    shards = _untag_variant(instance)[1].get("shardAssignments")
    return shards if isinstance(shards, dict) else {}


def side_session(headers: Sequence[tuple[str, str]], tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Return an HTTP session for requests that are not part of the load, with llmtap's User-Agent."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S),
        headers={**dict(headers), "User-Agent": USER_AGENT},
        connector=aiohttp.TCPConnector(ssl=tls or True),
    )


async def _get_body(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url) as response:
        return await read_at_most(response) if response.status == 200 else b""


# ---------------------------------------------------------------- nodes of an exo cluster


class NodeMetrics:
    """Samples power, temperature and load of the nodes of an exo cluster. A failure does not end the run."""

    def __init__(
        self, clock: Clock, url: str, headers: Sequence[tuple[str, str]], tls: ssl.SSLContext | None
    ) -> None:
        self.columns: dict[str, Columns] = {}
        """By id of the node: its samples."""
        self.failed = 0
        """Number of failed requests for samples."""
        self._clock = clock
        self._url = f"{url}/state/nodeSystem"
        self._session = side_session(headers, tls)
        self._sampling_task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        self._sampling_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sampling_task
        await self._session.close()

    async def _run(self) -> None:
        """Read the values of all nodes once a second."""
        ticks = Ticks(self._clock.mono_ns(), NS_PER_S)
        while True:
            began_ns = self._clock.mono_ns()
            try:
                node_values = msgspec.json.decode(await _get_body(self._session, self._url), type=JsonObject)
                ended_ns = self._clock.mono_ns()
                self._add(node_values, (began_ns + ended_ns) // 2, ended_ns - began_ns)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                self.failed += 1
            await asyncio.sleep(ticks.next_wait(self._clock.mono_ns())[0])

    def _add(self, node_values: Mapping[str, Any], t_ns: int, took_ns: int) -> None:
        """Add the values of each node to its columns. `took_ns`: duration of the read."""
        for node, values_of_node in node_values.items():
            if node not in self.columns and len(self.columns) >= _NODES_SAMPLED_MAX:
                continue
            samples = {
                name: float(values_of_node[key])
                for key, (name, _) in _NODE_SERIES.items()
                if isinstance(values_of_node, dict) and isinstance(values_of_node.get(key), int | float)
            }
            columns = self.columns.setdefault(node, Columns(dict(_NODE_SERIES.values())))
            columns.add(t_ns, took_ns, samples)


# ---------------------------------------------------------------- energy and peak memory of a time window


class Power:
    """Power and memory samples of this host, if the server is on it, and of exo's nodes by id."""

    def __init__(self, local: Columns | None, nodes: Mapping[str, Columns]) -> None:
        self._local = local
        """Samples of this host; None: the server is on another host."""
        self._known_series = [] if local is None else local.known_series()
        """Names of the series that this host can sample."""
        # Use the power of this host's GPUs only if no node reports power: a node's power includes its GPUs.
        self._sources = [(one, "power") for one in nodes.values() if "power" in one.known_series()] or [
            (local, name) for name in self._known_series if local is not None and name.endswith("_power")
        ]
        """Columns of samples, and the name of the power in them, of each source of energy."""

    def energy(self, from_ns: int, to_ns: int) -> Energy | None:
        """Return the energy of all sources in a time window; None if a source has too few samples."""
        parts: list[Energy] = []
        for columns, name in self._sources:
            one = energy_of(columns.times_ns(), columns.column(name), from_ns=from_ns, to_ns=to_ns)
            if one is None:
                return None
            parts.append(one)
        if not parts:
            return None
        return Energy(
            sum(one.joules for one in parts),
            min(one.known_ns for one in parts),
            max(one.missing_ns for one in parts),
        )

    def peak_memory(self, from_ns: int, to_ns: int) -> int | None:
        """Return the maximum memory in bytes: of the GPUs, or on a host without GPUs, of the server.

        The last sample before the window and the first sample after it also count. None without samples.
        """
        if self._local is None:
            return None
        gpus = [name for name in self._known_series if name.startswith("gpu") and name.endswith("_memory")]
        times_ns = self._local.times_ns()
        within = slice(max(0, bisect_right(times_ns, from_ns) - 1), bisect_left(times_ns, to_ns) + 1)
        columns = [self._local.column(name)[within] for name in gpus or ["server_memory"]]
        sums = [sum(row) for row in zip(*columns, strict=True) if None not in row]
        return int(max(sums)) if sums else None


class TotalEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """Public JSON: energy of all batches together."""

    joules: float
    """Energy of all batches."""
    inference_seconds: float
    """Total time of the windows for which there are power samples."""
    seconds_missing: float
    """Total time of the windows for which there are no power samples."""
    average_power_w: float | None
    """Mean power during the batches, in watts."""


def total_of(windows: Iterable[Energy | None]) -> TotalEnergy | None:
    """Return the total energy of all windows and their average power, or None without samples."""
    known = [window for window in windows if window is not None]
    if not known:
        return None
    return TotalEnergy(
        joules=sum(window.joules for window in known),
        inference_seconds=to_seconds(sum(window.known_ns for window in known)),
        seconds_missing=to_seconds(sum(window.missing_ns for window in known)),
        average_power_w=average_power_w(known),
    )


# ---------------------------------------------------------------- placement of a model on an exo cluster


class PlacementFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed placements of a model: type of the instance, sharding, number of nodes."""

    instance_meta: Literal["ring", "jaccl", "both"] = "both"
    """Allowed transport between the nodes."""
    sharding: Literal["pipeline", "tensor", "both"] = "both"
    """How the model may be split among the nodes."""
    nodes_min: int = 1
    nodes_max: int = NODES_MAX

    def matches(self, preview: Mapping[str, Any]) -> bool:
        """Return whether a preview has no error and matches this filter."""
        meta, sharding, nodes = _preview_rank(preview)
        meta, sharding = meta.lower(), sharding.lower()
        if preview.get("error") is not None or not self.nodes_min <= nodes <= self.nodes_max:
            return False
        # Skip tensor and jaccl on one node, where they are the same placement as pipeline and ring.
        if self.instance_meta == "both":
            meta_fits = nodes > 1 or "jaccl" not in meta
        else:
            meta_fits = self.instance_meta in meta
        if self.sharding == "both":
            return meta_fits and (nodes > 1 or "tensor" not in sharding)
        return meta_fits and self.sharding in sharding


class PlacedInstance(msgspec.Struct, frozen=True, kw_only=True):
    """Instance of the model on the cluster's nodes."""

    id: str
    others: int
    """Number of other placements that match the filter and were not used."""
    download_s: float | None
    """Seconds of the model's download; None if every node had the model."""


class ExoCluster:
    """The API of an exo cluster at the URL `root`. Its methods raise LlmtapError if exo reports a failure."""

    def __init__(self, session: aiohttp.ClientSession, root: str) -> None:
        self._session = session
        self._root = root
        """URL of the API, without a path."""

    async def place(self, model: str, placement_filter: PlacementFilter) -> PlacedInstance:
        """Create an instance and wait until it is ready. Raises ConfigError if no placement matches."""
        response = await self._request("GET", "/instance/previews", params={"model_id": model})
        previews = [
            preview for preview in (response or {}).get("previews") or () if placement_filter.matches(preview)
        ]
        if not previews:
            hint = "change or leave out --instance-meta, --sharding, --min-nodes or --max-nodes"
            raise ConfigError("--instance-meta", f"exo offers no matching placement of {model}", hint)
        instance = max(previews, key=_preview_rank)["instance"]
        shards = _shards(instance)
        download_s = await self._download_missing(model, shards)
        await self._request("POST", "/instance", body={"instance": instance})
        placed = PlacedInstance(
            id=str(_untag_variant(instance)[1].get("instanceId")),
            others=len(previews) - 1,
            download_s=download_s,
        )
        try:
            await self._wait_until_ready(placed.id, list(shards.get("runnerToShard") or {}))
        except BaseException:  # CancelledError is no Exception, but the instance must be removed then, too.
            await self.remove(placed)
            raise
        return placed

    async def remove(self, instance: PlacedInstance) -> None:
        """Delete the instance from the cluster."""
        await self._request("DELETE", f"/instance/{instance.id}")

    async def _download_missing(self, model: str, shards: Mapping[str, Any]) -> float | None:
        """Download the model to the nodes that lack it; return the seconds, None if none lacked it."""
        nodes: Mapping[str, str] = shards.get("nodeToRunner") or {}
        missing = [node for node in nodes if not await self._has_model(node, model)]
        began_ns = SystemClock.mono_ns()
        for node in missing:
            body = {"targetNodeId": node, "shardMetadata": shards["runnerToShard"][nodes[node]]}
            await self._request("POST", "/download/start", body=body)
        for node in missing:
            while not await self._has_model(node, model):
                await asyncio.sleep(DOWNLOAD_POLL_S)
        return (SystemClock.mono_ns() - began_ns) / NS_PER_S if missing else None

    async def _has_model(self, node: str, model: str) -> bool:
        for tagged in await self._request("GET", f"/state/downloads/{node}") or ():
            state, download = _untag_variant(tagged)
            if _untag_variant(download.get("shardMetadata"))[1].get("modelCard", {}).get("modelId") != model:
                continue
            if state == "DownloadCompleted":
                return True
            if state == "DownloadFailed":
                reason = download.get("errorMessage") or "no reason given"
                raise LlmtapError(f"exo: the download to node {node} failed: {reason}; see the node's log")
        return False

    async def _wait_until_ready(self, instance_id: str, runners: Sequence[str]) -> None:
        has_existed = False
        while True:
            instance = await self._request("GET", f"/state/instances/{instance_id}")
            if instance is None and has_existed:
                what = f"the instance {instance_id} was deleted before it was ready"
                raise LlmtapError(f"exo: {what}: run llmtap again")
            has_existed = instance is not None
            states = [await self._request("GET", f"/state/runners/{runner}") or {} for runner in runners]
            for state in states:
                if "RunnerFailed" in state:
                    reason = state["RunnerFailed"].get("errorMessage") or "no reason given"
                    raise LlmtapError(f"exo: a runner of {instance_id} failed: {reason}; see exo's log")
            if has_existed and all("RunnerReady" in state for state in states):
                return
            await asyncio.sleep(POLL_S)

    async def _request(self, method: str, path: str, *, params: Any = None, body: Any = None) -> Any:
        """Return the JSON of a response, or None for status 404."""
        url = f"{self._root}{path}"
        try:
            async with self._session.request(method, url, params=params, json=body) as response:
                raw = await read_at_most(response)
                if response.status == 404:
                    return None
                if response.status >= 400:
                    raise LlmtapError(f"exo: {method} {url} returned status {response.status}: see exo's log")
                return msgspec.json.decode(raw) if raw else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise LlmtapError(f"exo: {method} {url} failed: {failure_text(exc)}; does exo run?") from None


def _preview_rank(preview: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return kind, split and number of nodes of an offered placement, by which placements are ordered."""
    nodes = len(_shards(preview.get("instance")).get("nodeToRunner") or ())
    return str(preview.get("instance_meta")), str(preview.get("sharding")), nodes
