"""Place a model on the nodes of an exo cluster for a benchmark, and remove the instance afterwards.

`mode.py` calls `place` before its measurements and `remove` after them. The order is exo-bench's: previews,
download on each node, instance, runners ready. Of the previews that fit the options (`PlacementWish`), the
one whose instance type, sharding (by name) and number of nodes sort last is used. Other instances remain.

Source: exo-bench's methodology, "Reproducing Results"; exo's bench/harness.py.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import aiohttp
import msgspec

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.units import NS_PER_S

NODES_MAX: Final = 4
LOOK_S: Final = 0.1
DOWNLOAD_LOOK_S: Final = 1.0


class PlacementWish(msgspec.Struct, frozen=True, kw_only=True):
    instance_meta: Literal["ring", "jaccl", "both"] = "both"
    sharding: Literal["pipeline", "tensor", "both"] = "both"
    nodes_min: int = 1
    nodes_max: int = NODES_MAX

    def fits(self, preview: Mapping[str, Any]) -> bool:
        """Return whether a preview has no error and matches the wish."""
        nodes = len(_shards(preview.get("instance")).get("nodeToRunner") or {})
        meta, sharding = (str(preview.get(name) or "").lower() for name in ("instance_meta", "sharding"))
        if preview.get("error") is not None or not self.nodes_min <= nodes <= self.nodes_max:
            return False
        # On one node, tensor and jaccl are the same as pipeline and ring.
        if nodes == 1 and (
            (self.sharding == "both" and "tensor" in sharding)
            or (self.instance_meta == "both" and "jaccl" in meta)
        ):
            return False
        return all(
            any(known in told for known in (choices if wanted == "both" else (wanted,)))
            for told, wanted, choices in (
                (meta, self.instance_meta, ("ring", "jaccl")),
                (sharding, self.sharding, ("pipeline", "tensor")),
            )
        )


class PlacedInstance(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    others: int
    """Number of other placements that match."""
    download_s: float | None
    """None if every node had the model."""


async def place(session: aiohttp.ClientSession, root: str, model: str, wish: PlacementWish) -> PlacedInstance:
    """Create an instance and wait until it is ready. Raises ConfigError, or LlmtapError if exo fails."""
    told = await _ask(session, "GET", f"{root}/instance/previews", params={"model_id": model})
    previews = [preview for preview in (told or {}).get("previews") or () if wish.fits(preview)]
    if not previews:
        raise ConfigError(
            "--instance-meta", f"no placement of {model} fits", "see --sharding, --min-nodes and --max-nodes"
        )
    previews.sort(key=_rank, reverse=True)
    instance = previews[0]["instance"]
    shards = _shards(instance)
    download_s = await _download(session, root, model, shards)
    await _ask(session, "POST", f"{root}/instance", body={"instance": instance})
    instance_id = str(_inner(instance).get("instanceId"))
    placed = PlacedInstance(id=instance_id, others=len(previews) - 1, download_s=download_s)
    try:
        await _ready(session, root, instance_id, list(shards.get("runnerToShard") or {}))
    except BaseException:  # a cancellation, too
        await remove(session, root, placed)
        raise
    return placed


async def remove(session: aiohttp.ClientSession, root: str, instance: PlacedInstance) -> None:
    await _ask(session, "DELETE", f"{root}/instance/{instance.id}")


async def _download(
    session: aiohttp.ClientSession, root: str, model: str, shards: Mapping[str, Any]
) -> float | None:
    nodes: Mapping[str, str] = shards.get("nodeToRunner") or {}
    missing = [node for node in nodes if not await _has(session, root, node, model)]
    began_ns = SystemClock.mono_ns()
    for node in missing:
        shard = shards["runnerToShard"][nodes[node]]
        body = {"targetNodeId": node, "shardMetadata": shard}
        await _ask(session, "POST", f"{root}/download/start", body=body)
    for node in missing:
        while not await _has(session, root, node, model):
            await asyncio.sleep(DOWNLOAD_LOOK_S)
    return (SystemClock.mono_ns() - began_ns) / NS_PER_S if missing else None


async def _has(session: aiohttp.ClientSession, root: str, node: str, model: str) -> bool:
    for tagged in await _ask(session, "GET", f"{root}/state/downloads/{node}") or ():
        ((state, told),) = tagged.items()
        if _inner(told.get("shardMetadata")).get("modelCard", {}).get("modelId") != model:
            continue
        if state == "DownloadCompleted":
            return True
        if state == "DownloadFailed":
            raise LlmtapError(f"exo: the download on {node} failed: {told.get('errorMessage')}")
    return False


async def _ready(session: aiohttp.ClientSession, root: str, instance_id: str, runners: Sequence[str]) -> None:
    existed = False
    while True:
        instance = await _ask(session, "GET", f"{root}/state/instances/{instance_id}")
        if instance is None and existed:
            raise LlmtapError(f"exo: the instance {instance_id} was deleted while it was loaded")
        existed = instance is not None
        states = [await _ask(session, "GET", f"{root}/state/runners/{runner}") or {} for runner in runners]
        for state in states:
            if "RunnerFailed" in state:
                raise LlmtapError(f"exo: a runner failed: {state['RunnerFailed'].get('errorMessage')}")
        if existed and all("RunnerReady" in state for state in states):
            return
        await asyncio.sleep(LOOK_S)


async def _ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    params: Mapping[str, str] | None = None,
    body: Any = None,
) -> Any:
    """Return the JSON of a response, or None for status 404. Raises LlmtapError."""
    try:
        async with session.request(method, url, params=params, json=body) as response:
            raw = await response.read()
            if response.status == 404:
                return None
            if response.status >= 400:
                raise LlmtapError(f"exo: {method} {response.url.path} was answered with {response.status}")
            return msgspec.json.decode(raw) if raw else None
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        raise LlmtapError(f"exo: {method} {url} failed: {exc}") from None


def _rank(preview: Mapping[str, Any]) -> tuple[str, str, int]:
    nodes = len(_shards(preview["instance"])["nodeToRunner"])
    return str(preview.get("instance_meta")), str(preview.get("sharding")), nodes


def _inner(tagged: Any) -> Mapping[str, Any]:
    """Return the value of the only key of an object: exo encodes variants like that."""
    inner = next(iter(tagged.values()), None) if isinstance(tagged, dict) and len(tagged) == 1 else None
    return inner if isinstance(inner, dict) else {}


def _shards(instance: Any) -> Mapping[str, Any]:
    shards = _inner(instance).get("shardAssignments")
    return shards if isinstance(shards, dict) else {}
