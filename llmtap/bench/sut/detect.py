"""Detect model, server and settings of a system under test, with a few small requests.

`llmtap bench init` calls `detect` with a target and gets the values of bench-file keys that it found, each
with its source, and hints and notes for the rest (`Detected`). The requests are `/v1/models`, endpoints of
vLLM, SGLang, LiteLLM and `llmtap sim serve`, `/metrics`, and one short stream for the tokens per chunk.
Response headers and a status 404 are used, too. `round_trip_ns` measures the network round trip, also for a
run's loads.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from llmtap import __version__
from llmtap.bench.sut.sut import BenchTarget
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.saved import explain, read_saved
from llmtap.load.bodies import BodyMaker, BodyOptions, model_ids, server_of
from llmtap.load.monitor.system import open_gpus
from llmtap.load.replay.options import read_headers
from llmtap.load.sending import PATHS
from llmtap.metrics.latency import measure
from llmtap.net.tls import client_context
from llmtap.units import format_ns
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import VOCABULARY

CHAT: Final = "chat.completions"
TIMEOUT_S: Final = 10
PROBE_TIMEOUT_S: Final = 120
"""Long, since the first request may load the model."""
PROBE_TOKENS: Final = 32
BODY_BYTES_MAX: Final = 16 << 20
TRIPS: Final = 5
"""Number of connections; the fastest handshake is the round trip."""
SINGLE_SHARE: Final = 0.9
"""IETF B.2.1: single-token chunks dominate above this."""
_PROBE: Final = Prompt(text="Say in one sentence what the sea looks like in the evening.")
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Fact:
    value: Any
    how: str


@dataclass(slots=True)
class Detected:
    url: str
    facts: dict[str, Fact] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    """Incomplete knowledge by key."""
    notes: list[str] = field(default_factory=list)

    def know(self, key: str, value: Any, how: str) -> None:
        """Add a fact unless the key has one."""
        if value not in (None, "", []):
            self.facts.setdefault(key, Fact(value, how))


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    fields: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        try:
            value = msgspec.json.decode(self.body) if self.status == 200 else None
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


async def detect(target: BenchTarget, clock: Clock | None = None) -> Detected:
    """Ask a server about itself. Raises ConfigError if it cannot be reached."""
    one = _Detecting(target, SystemClock() if clock is None else clock)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await one.run(session)


async def round_trip_ns(url: str, clock: Clock) -> int | None:
    """Return the time of the quickest of `TRIPS` TCP handshakes; None if nobody accepts one (IETF 4.7.3)."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme in ("https", "wss", "grpcs") else 80)
    trips = []
    for _ in range(TRIPS):
        began_ns = clock.mono_ns()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except (OSError, TimeoutError):
            continue
        trips.append(clock.mono_ns() - began_ns)
        writer.close()
    return min(trips, default=None)


class _Detecting:
    def __init__(self, target: BenchTarget, clock: Clock) -> None:
        if target.endpoint not in PATHS:
            raise ConfigError(
                "target.endpoint", f"expected one of {', '.join(PATHS)}, got {target.endpoint!r}"
            )
        self._target = target
        self._clock = clock
        parts = urlsplit(target.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "--target", "expected http://host:port or https://host", "other protocols by hand"
            )
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = client_context(target.ca, True) if parts.scheme == "https" else None
        self._root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._base = self._root + parts.path.rstrip("/").removesuffix("/v1")
        self._headers = dict([*read_headers([], None, target.key_env), *target.headers.items()])
        self.found = Detected(target.url)

    async def run(self, session: aiohttp.ClientSession) -> Detected:
        models = await self._get(session, f"{self._base}/v1/models")
        if models is None:
            raise ConfigError("--target", f"{self._root} cannot be reached")
        await self._identify(session, models)
        await self._metrics(session)
        await self._endpoint(session)
        await self._clocks()
        if "sut.software" not in self.found.facts and models.fields.get("Server"):
            self.found.hints["sut.software"] = f"its answers say Server: {models.fields['Server']}"
        return self.found

    async def _identify(self, session: aiohttp.ClientSession, models: _Answer) -> None:
        know = self.found.know
        listed = model_ids(models.body) if models.status == 200 else []
        server = server_of(models.body) if models.status == 200 else "auto"
        if models.status in (401, 403):
            self.found.notes.append("it wants a key: export it, and name its variable by target.key_env")
        if len(listed) == 1:
            know("target.model", listed[0], "GET /v1/models")
        elif listed:
            self.found.hints["target.model"] = f"one of {', '.join(listed[:12])}"
        if await self._is_there(session, "/sim/truth?since=0"):
            know("sut.software", "llmtap sim serve", "it answers /sim/truth")
            know("sut.boundary", "model engine", "llmtap's simulated engine")
            how = "it counts by llmtap's own"
            know("sut.tokenizer.name", f"llmtap words, {__version__}", how)
            know("sut.tokenizer.vocabulary", len(VOCABULARY), how)
            know("sut.tokenizer.source", "llmtap sim tokenizer", how)
            know("sut.tokenizer.special", "excluded: the tokenizer has none", how)
            know("sut.tokenizer.system_prompt", "included: in the prompt, as any other message", how)
            know("sut.tokenizer.tools", "no request has tools", "no test sends any")
            know("sut.hardware.accelerator", "none", "it is simulated")
            know("sut.hardware.count", 0, "it is simulated")
            know("sut.guardrails.input_filter", False, "unless --set guardrails... or headers ask for it")
            know("sut.guardrails.output_filter", False, "unless --set guardrails... or headers ask for it")
        readiness = await self._json(session, "/health/readiness")
        if "litellm_version" in readiness:
            know("sut.software", f"LiteLLM {readiness['litellm_version']}", "GET /health/readiness")
            know("sut.boundary", "application gateway", "LiteLLM is one")
            await self._litellm_guardrails(session)
        sglang = await self._json(session, "/server_info") or await self._json(session, "/get_server_info")
        if "disable_radix_cache" in sglang or "tp_size" in sglang:
            self._of_sglang(sglang, await self._json(session, "/get_model_info"))
        version = (await self._json(session, "/version")).get("version")
        if server == "vllm" and isinstance(version, str):
            know("sut.software", f"vLLM {version}", "GET /version")
            know("sut.boundary", "model engine", "vLLM is one")
        if server in ("vllm", "sglang"):
            know("target.server", server, _why(server, models.json()))
        root = _first(models.json().get("data")).get("root")
        if isinstance(root, str) and root and not root.startswith("/"):
            know("sut.tokenizer.source", root, "root of GET /v1/models")
        if len(listed) == 1:
            know("sut.model", listed[0], "GET /v1/models; add version and quantization")
        if not await self._is_there(session, "/health"):
            self.found.notes.append("GET /health does not answer 200")

    def _of_sglang(self, info: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        know, how = self.found.know, "SGLang's server info"
        name = " ".join(filter(None, ("SGLang", str(info.get("version") or ""))))
        know("sut.software", name, how)
        know("sut.boundary", "model engine", "SGLang is one")
        if isinstance(info.get("disable_radix_cache"), bool):
            know("sut.prefix_cache", not info["disable_radix_cache"], f"{how}: disable_radix_cache")
        if isinstance(info.get("max_running_requests"), int):
            know("sut.max_batch", info["max_running_requests"], f"{how}: max_running_requests")
        if isinstance(info.get("tp_size"), int):
            self.found.hints["sut.hardware.count"] = f"tensor parallel size {info['tp_size']}"
        path = model.get("model_path") or info.get("model_path")
        if isinstance(path, str):
            quantization = info.get("quantization")
            know("sut.model", f"{path}, {quantization}" if quantization else path, how)
        source = model.get("tokenizer_path") or info.get("tokenizer_path")
        know("sut.tokenizer.source", source if isinstance(source, str) else None, how)

    async def _litellm_guardrails(self, session: aiohttp.ClientSession) -> None:
        listed = (await self._json(session, "/guardrails/list")).get("guardrails")
        if not isinstance(listed, list):
            self.found.hints["sut.guardrails.names"] = "LiteLLM did not list its own"
            return
        how = "GET /guardrails/list"
        names, modes = [], set()
        for one in listed:
            if isinstance(one, dict):
                names.append(str(one.get("guardrail_name")))
                mode = (one.get("litellm_params") or {}).get("mode")
                modes |= set(mode if isinstance(mode, list) else [mode])
        self.found.know("sut.guardrails.names", names, how)
        self.found.know("sut.guardrails.input_filter", bool(modes & {"pre_call", "during_call"}), how)
        self.found.know("sut.guardrails.output_filter", "post_call" in modes, how)

    async def _metrics(self, session: aiohttp.ClientSession) -> None:
        """Read the cache configuration that vLLM and SGLang report as labels of a gauge."""
        answer = await self._get(session, self._target.metrics or f"{self._root}/metrics")
        if answer is None or answer.status != 200:
            self.found.hints["target.metrics"] = "GET /metrics does not answer: no preemptions"
            return
        for line in answer.body.decode(errors="replace").splitlines():
            if line.startswith(("vllm:cache_config_info{", "sglang:cache_config_info{")):
                labels = dict(_LABEL.findall(line))
                enabled = labels.get("enable_prefix_caching")
                if enabled in ("True", "False"):
                    self.found.know("sut.prefix_cache", enabled == "True", "cache_config_info in /metrics")
                block = labels.get("block_size") or labels.get("page_size")
                if block:
                    self.found.notes.append(f"blocks of the KV cache have {block} tokens")

    async def _endpoint(self, session: aiohttp.ClientSession) -> None:
        """Choose completions for an engine (its workload is token ids), else chat completions."""
        if _value(self.found.facts.get("sut.boundary")) == "model engine":
            how = "an engine's workload (4.3.2.1) is token ids, which a chat takes only by a tokenizer"
            if await self._probe(session, "completions"):
                self.found.know("target.endpoint", "completions", how)
                return
        if await self._probe(session, CHAT):
            self.found.know("target.endpoint", CHAT, "it answers there, and that is what users ask")

    async def _probe(self, session: aiohttp.ClientSession, endpoint: str) -> bool:
        """Send one short stream, for protocol, chunks and guardrails. False if there is no such endpoint."""
        found = self.found
        model = self._target.model or _value(found.facts.get("target.model"))
        server = _value(found.facts.get("target.server")) or self._target.server
        options = BodyOptions(
            endpoint=endpoint, server=server, model=model,  # type: ignore[arg-type]
            temperature=0.0, fields=self._target.body,
        )  # fmt: skip
        body = BodyMaker(options).body(_PROBE, PROBE_TOKENS)
        try:
            answer = await self._ask(session, self._base + PATHS[endpoint], body)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            found.notes.append(f"the probe got no answer: {type(exc).__name__}")
            return True
        if answer.status in (404, 405):
            return False
        if answer.status != 200:
            found.notes.append(f"the probe was answered with status {answer.status}: chunks are not known")
            return True
        if answer.fields.get("Content-Type", "").startswith("text/event-stream"):
            found.know("sut.protocol", "SSE", "the probe's content type")
        guards = [value for name, value in answer.fields.items() if "guardrail" in name.lower() and value]
        if guards:
            found.hints["sut.guardrails.names"] = f"the probe's head names {', '.join(guards)}"
        try:
            x = explain(read_saved(answer.body, path=PATHS[endpoint], request_body=body)).exchange
        except LlmtapError as exc:
            found.notes.append(f"the probe's answer could not be read: {exc}")
            return True
        if x.guardrail is not None:
            found.hints["sut.guardrails.input_filter"] = f"the probe was acted on: {x.guardrail}"
        measured = measure(x)
        self._chunking(measured.tokens_per_chunk, x.tokens.output, measured.output_events)
        return True

    def _chunking(self, tokens: list[int] | None, output: int | None, events: int) -> None:
        key = "sut.chunking"
        how = f"the probe: {output} tokens in {events} chunks" if output else f"the probe: {events} chunks"
        if tokens:
            share = tokens.count(1) / len(tokens)
            single = share > SINGLE_SHARE
            told = "one token per chunk" if single else "several tokens per chunk"
            self.found.know(key, told, f"{how}, {share:.0%} of them of one token")
        elif output and events and output > events:
            self.found.know(key, "several tokens per chunk", how)
        else:
            self.found.hints[key] = f"{how}, and it does not tell how many tokens are in each"

    async def _clocks(self) -> None:
        """Detect where the load generator runs (4.7), and the hardware of its machine."""
        found = self.found
        addresses = await self._addresses()
        if any(_is_ours(address, self._port) for address in addresses):
            found.know("sut.clock.placement", "same machine", f"{self._host} is an address of this one")
            gpus, why_not = open_gpus()
            if gpus is None:
                found.hints["sut.hardware.accelerator"] = f"this machine tells of none: {why_not}"
            else:
                kinds = ", ".join(dict.fromkeys(gpus.names))
                found.know("sut.hardware.accelerator", kinds, "this machine's, by NVML")
                found.know("sut.hardware.count", len(gpus.names), "this machine's; fewer may be in use")
                gpus.close()
            found.know("sut.hardware.cpu", _cpu(), "this machine's")
            return
        found.know("sut.clock.placement", "remote", f"{self._host} is no address of this machine")
        rtt_ns = await round_trip_ns(self._target.url, self._clock)
        if rtt_ns is not None:
            found.notes.append(
                f"network round trip {format_ns(rtt_ns)} (4.7.3; quickest of {TRIPS} connections)"
            )
        found.hints["sut.clock.synchronization"] = (
            "TTFT, gaps and E2E are differences of one clock, ours: only the server's own stamps need it"
        )

    async def _addresses(self) -> list[str]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
        except OSError:
            return []
        return list(dict.fromkeys(str(one[4][0]) for one in found))

    async def _is_there(self, session: aiohttp.ClientSession, path: str) -> bool:
        answer = await self._get(session, self._root + path)
        return answer is not None and answer.status == 200

    async def _json(self, session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
        answer = await self._get(session, self._root + path)
        return {} if answer is None else answer.json()

    async def _get(self, session: aiohttp.ClientSession, url: str) -> _Answer | None:
        try:
            return await self._ask(session, url, None)
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError):
            return None

    async def _ask(self, session: aiohttp.ClientSession, url: str, body: bytes | None) -> _Answer:
        fields = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S if body is None else PROBE_TIMEOUT_S)
        async with session.request(
            "GET" if body is None else "POST", url, data=body, headers=fields, ssl=self._tls or True,
            timeout=timeout, allow_redirects=False,
        ) as response:  # fmt: skip
            read = bytearray()
            async for chunk in response.content.iter_any():
                read += chunk
                if len(read) > BODY_BYTES_MAX:
                    break
            return _Answer(response.status, response.headers, bytes(read))


def _value(fact: Fact | None) -> Any:
    return None if fact is None else fact.value


def _why(server: str, listed: Mapping[str, Any]) -> str:
    owner = str(_first(listed.get("data")).get("owned_by"))
    if owner.lower() == server:
        return "owned_by of GET /v1/models"
    return f"owned_by of GET /v1/models is {owner}: the simulated engine, which knows the fields of {server}"


def _first(value: object) -> dict[str, Any]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return value[0]
    return {}


def _is_ours(address: str, port: int) -> bool:
    """Return whether an address is this machine's: packets to it then have it as source."""
    try:
        if ip_address(address.partition("%")[0]).is_loopback:
            return True
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, port))  # of UDP: nothing is sent
            return bool(sock.getsockname()[0] == address)
    except (OSError, ValueError):
        return False


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} CPUs" if names else None
