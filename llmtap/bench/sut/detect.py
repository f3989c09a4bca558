"""Detect model, server and settings of a system under test with a few small requests, and write a bench file.

`llmtap bench init` calls `detect` with a target and gets the detected values of bench-file keys, each with
its source, and hints for the other keys (`Detected`). `starter_text` makes the file from them, with comments
for the keys that were not detected. The requests are `/v1/models`, endpoints of vLLM, SGLang, LiteLLM and
`llmtap sim serve`, `/metrics`, and one short stream for the tokens per chunk. `round_trip_ns` measures the
network round trip, also for a run's loads.
"""

import asyncio
import re
import socket
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, get_args, get_origin
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec.inspect import Metadata, type_info

from llmtap.bench.run.test import TESTS
from llmtap.bench.sut.clock_offset import NOT_KNOWN, read_clock_offset
from llmtap.bench.sut.sut import BenchTarget, Guardrails, Hardware, Sut, SutClock, SutTokenizer
from llmtap.clock import Clock, SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.saved import explain, read_saved
from llmtap.json_types import JsonObject
from llmtap.load.bodies import BodyMaker, model_ids, server_of
from llmtap.load.monitor.system import open_gpus
from llmtap.load.options import BodyOptions
from llmtap.load.replay.options import read_headers
from llmtap.load.sending import PATHS
from llmtap.metrics.latency import measure
from llmtap.net.listener import failure_text
from llmtap.net.tls import client_context
from llmtap.units import format_ns
from llmtap.version import __version__
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.text import VOCABULARY

CHAT: Final = "chat.completions"
TIMEOUT_S: Final = 10
PROBE_TIMEOUT_S: Final = 120
"""Time limit of the probe, a short request. It is long, because some servers load the model at the first."""
PROBE_TOKENS: Final = 32
BODY_BYTES_MAX: Final = 16 << 20
TRIPS: Final = 5
"""Number of connections opened to measure the round trip; only the fastest handshake counts."""
SINGLE_SHARE: Final = 0.9
"""Share of single-token chunks above which the stream counts as one of single tokens (IETF B.2.1)."""
PROBE: Final = Prompt(text="Say in one sentence what the sea looks like in the evening.")
_CACHE: Final = re.compile(
    r'^(?:vllm|sglang):cache_config_info\{.*enable_prefix_caching="(True|False)"', re.MULTILINE
)
_SIMULATED: Final[Mapping[str, Any]] = {
    "sut.software": "llmtap sim serve",
    "sut.boundary": "model engine",
    "sut.tokenizer.name": f"llmtap words, {__version__}",
    "sut.tokenizer.vocabulary": len(VOCABULARY),
    "sut.tokenizer.source": "llmtap sim tokenizer",
    "sut.tokenizer.special": "excluded: the tokenizer has none",
    "sut.tokenizer.system_prompt": "included: in the prompt, as any other message",
    "sut.tokenizer.tools": "no request has tools",
    "sut.hardware.accelerator": "none",
    "sut.hardware.count": 0,
    "sut.guardrails.input_filter": False,
    "sut.guardrails.output_filter": False,
}
"""Values of bench-file keys for llmtap's simulated engine; they are known, so they are not detected."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Detected value of a key of the bench file, and its source for the comment in the file."""

    value: Any
    source: str
    """Where the value comes from, such as a path of the server."""


@dataclass(slots=True)
class Detected:
    """Detected values of the keys of a bench file."""

    url: str
    facts: dict[str, Fact] = field(default_factory=dict)
    """By key of the bench file: detected value."""
    hints: dict[str, str] = field(default_factory=dict)
    """Hints by key: what is known about a value that could not be detected completely."""
    notes: list[str] = field(default_factory=list)
    """Further findings that are not values of a key, as clauses for comments of the bench file."""

    def add_fact(self, key: str, value: Any, source: str) -> None:
        """Add a value for a key, with its source, unless the key has one already or the value is empty."""
        if value not in (None, "", []):
            self.facts.setdefault(key, Fact(value, source))

    def value(self, key: str) -> Any:
        return self.facts[key].value if key in self.facts else None


async def detect(target: BenchTarget) -> Detected:
    """Detect values of the bench file from a server. Raises ConfigError if the server cannot be reached."""
    parts = urlsplit(target.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "--target",
            f"expected http://host:port or https://host, got {target.url!r}",
            "for a server with another protocol, write the file of --config by hand",
        )
    async with aiohttp.ClientSession() as session:
        one = _Detector(session, target)
        await one.identify()
        await one.read_metrics()
        await one.choose_endpoint()
    await _detect_place(one.detected, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    return one.detected


async def round_trip_ns(url: str, clock: Clock) -> int | None:
    """Return the time of the fastest of `TRIPS` TCP handshakes (IETF 4.7.3); None if all of them fail."""
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


class _Detector:
    """Reads from a server what it reports about itself."""

    def __init__(self, session: aiohttp.ClientSession, target: BenchTarget) -> None:
        self._session = session
        self._target = target
        parts = urlsplit(target.url)
        self._tls = client_context(target.ca, True) if parts.scheme == "https" else None
        self._root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        """Scheme and address of the server, without a path."""
        self._base = self._root + parts.path.rstrip("/").removesuffix("/v1")
        """URL of the server without `/v1`."""
        self._headers = dict([*read_headers([], None, target.key_env), *target.headers.items()])
        self.detected = Detected(target.url)
        """Facts that were found so far."""

    async def identify(self) -> None:
        """Detect server type, model and software. Raises ConfigError if the server cannot be reached."""
        add_fact = self.detected.add_fact
        try:
            status, _, body = await self._request(f"{self._base}/v1/models")
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            problem = f"{self._root} cannot be reached: {failure_text(exc)}"
            raise ConfigError(
                "--target", problem, "check that the server runs and that the URL is right"
            ) from None
        if status in (401, 403):
            self.detected.notes.append("it wants a key: export it, and name its variable by target.key_env")
        listed = model_ids(body) if status == 200 else []
        server = server_of(body) if status == 200 else "auto"
        if len(listed) == 1:
            add_fact("target.model", listed[0], "GET /v1/models")
        elif listed:
            self.detected.hints["target.model"] = f"one of {', '.join(listed[:12])}"
        if await self._get_json("/sim/truth?since=0"):
            for key, value in _SIMULATED.items():
                add_fact(key, value, "it answers /sim/truth: the simulated engine")
        if version := (await self._get_json("/health/readiness")).get("litellm_version"):
            add_fact("sut.software", f"LiteLLM {version}", "GET /health/readiness")
            add_fact("sut.boundary", "application gateway", "LiteLLM is one")
            await self._detect_guardrails()
        if server == "sglang":
            await self._detect_sglang()
        if server == "vllm" and (version := (await self._get_json("/version")).get("version")):
            add_fact("sut.software", f"vLLM {version}", "GET /version")
        if server in ("vllm", "sglang"):
            add_fact("sut.boundary", "model engine", f"{server} is one")
            add_fact("target.server", server, "owned_by of GET /v1/models")
        if len(listed) == 1:
            first = msgspec.json.decode(body)["data"][0]
            root = str(first.get("root") or "")
            add_fact("sut.tokenizer.source", "" if root.startswith("/") else root, "root of GET /v1/models")
            add_fact("sut.model", listed[0], "GET /v1/models; add version and quantization")

    async def _detect_sglang(self) -> None:
        add_fact, source = self.detected.add_fact, "SGLang's server info"
        info = await self._get_json("/server_info") or await self._get_json("/get_server_info")
        model = await self._get_json("/get_model_info")
        add_fact("sut.software", f"SGLang {info.get('version') or ''}".strip(), source)
        if "disable_radix_cache" in info:
            add_fact("sut.prefix_cache", not info["disable_radix_cache"], f"{source}: disable_radix_cache")
        add_fact("sut.max_batch", info.get("max_running_requests"), f"{source}: max_running_requests")
        named = (model.get("model_path") or info.get("model_path"), info.get("quantization"))
        add_fact("sut.model", ", ".join(filter(None, named)), source)
        add_fact("sut.tokenizer.source", model.get("tokenizer_path") or info.get("tokenizer_path"), source)

    async def _detect_guardrails(self) -> None:
        source = "GET /guardrails/list"
        listed = (await self._get_json("/guardrails/list")).get("guardrails")
        if not isinstance(listed, list):
            return
        listed = [one for one in listed if isinstance(one, dict)]
        modes = set()
        for one in listed:
            mode = (one.get("litellm_params") or {}).get("mode")
            modes |= set(mode if isinstance(mode, list) else [mode])
        self.detected.add_fact(
            "sut.guardrails.names", [str(one.get("guardrail_name")) for one in listed], source
        )
        self.detected.add_fact(
            "sut.guardrails.input_filter", bool(modes & {"pre_call", "during_call"}), source
        )
        self.detected.add_fact("sut.guardrails.output_filter", "post_call" in modes, source)

    async def read_metrics(self) -> None:
        """Read whether the prefix cache is on, which vLLM and SGLang report as a label of a gauge."""
        try:
            _, _, body = await self._request(self._target.metrics or f"{self._root}/metrics")
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        if match := _CACHE.search(body.decode(errors="replace")):
            self.detected.add_fact("sut.prefix_cache", match[1] == "True", "cache_config_info in /metrics")

    async def choose_endpoint(self) -> None:
        """Choose completions for a model engine, whose workload is token ids (chat takes text); else chat."""
        if self.detected.value("sut.boundary") == "model engine" and await self._probe("completions"):
            source = "an engine's workload (4.3.2.1) is token ids, which a chat takes only by a tokenizer"
            self.detected.add_fact("target.endpoint", "completions", source)
        elif await self._probe(CHAT):
            self.detected.add_fact("target.endpoint", CHAT, "it answers there, and that is what users ask")
        elif await self._probe("completions"):
            self.detected.add_fact("target.endpoint", "completions", "it has no chat completions")
        else:
            self.detected.notes.append("it has neither /v1/chat/completions nor /v1/completions")

    async def _probe(self, endpoint: str) -> bool:
        """Request one short stream to detect the protocol and the tokens per chunk.

        Return False if the server has no such endpoint.
        """
        detected, target = self.detected, self._target
        options = BodyOptions(
            endpoint=endpoint,  # type: ignore[arg-type]
            server=detected.value("target.server") or target.server,
            model=target.model or detected.value("target.model"),
            temperature=0.0,
            fields=target.body,
        )
        body = BodyMaker(options).body(PROBE, PROBE_TOKENS)
        try:
            status, head, answer = await self._request(self._base + PATHS[endpoint], body)
            if status in (404, 405):
                return False
            if status != 200:
                raise LlmtapError(
                    f"POST {PATHS[endpoint]} returned status {status}; see the log of the server"
                )
            x = explain(read_saved(answer, path=PATHS[endpoint], request_body=body)).exchange
        except (aiohttp.ClientError, TimeoutError, OSError, LlmtapError) as exc:
            detected.notes.append(f"the probe failed, so chunks are not known: {exc or type(exc).__name__}")
            return True
        if head.get("Content-Type", "").startswith("text/event-stream"):
            detected.add_fact("sut.protocol", "SSE", "the probe's content type")
        measured = measure(x)
        tokens, output, events = measured.tokens_per_chunk or [], x.tokens.output, measured.output_events
        source = f"the probe: {output or 'unknown'} tokens in {events} chunks"
        single = bool(tokens) and tokens.count(1) / len(tokens) > SINGLE_SHARE
        if tokens or (output and 0 < events < output):
            chunking = "one token per chunk" if single else "several tokens per chunk"
            detected.add_fact("sut.chunking", chunking, source)
        else:
            detected.hints["sut.chunking"] = source
        return True

    async def _get_json(self, path: str) -> JsonObject:
        """Return the JSON object that the server sends for GET of a path; {} if it sends none."""
        try:
            status, _, body = await self._request(self._root + path)
            value = msgspec.json.decode(body) if status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    async def _request(self, url: str, body: bytes | None = None) -> tuple[int, Mapping[str, str], bytes]:
        fields = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S if body is None else PROBE_TIMEOUT_S)
        async with self._session.request(
            "GET" if body is None else "POST",
            url,
            data=body,
            headers=fields,
            ssl=self._tls or True,
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            read = bytearray()
            async for chunk in response.content.iter_any():
                read += chunk
                if len(read) > BODY_BYTES_MAX:
                    break
            return response.status, response.headers, bytes(read)


async def _detect_place(detected: Detected, host: str, port: int) -> None:
    """Detect where the load generator runs (IETF 4.7), and the hardware of its machine."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    if not any(_is_own_address(str(one[4][0]), port) for one in addresses):
        detected.add_fact("sut.clock.placement", "remote", f"{host} is no address of this machine")
        clock = await read_clock_offset()
        if clock is None:
            detected.notes.append(f"the NTP offset of this machine is {NOT_KNOWN}")
        else:
            detected.add_fact(
                "sut.clock.synchronization", clock.method, "this machine's; see that the SUT's is equal"
            )
            detected.add_fact(
                "sut.clock.accuracy", f"{clock.accuracy * 1e3:.3g}ms", f"this machine: {clock.text}"
            )
        rtt_ns = await round_trip_ns(detected.url, SystemClock())
        if rtt_ns is not None:
            detected.notes.append(f"network round trip {format_ns(rtt_ns)} (4.7.3; quickest of {TRIPS})")
        return
    detected.add_fact("sut.clock.placement", "same machine", f"{host} is an address of this one")
    gpus, _ = open_gpus()
    if gpus is not None:
        kinds = ", ".join(dict.fromkeys(gpus.names))
        detected.add_fact("sut.hardware.accelerator", kinds, "this machine's, by NVML")
        detected.add_fact("sut.hardware.count", len(gpus.names), "this machine's; fewer may be in use")
        gpus.close()
    detected.add_fact("sut.hardware.cpu", _cpu_model(), "this machine's")


def _is_own_address(address: str, port: int) -> bool:
    """Return whether an address belongs to this machine.

    If it does, packets to the address also have it as their source address.
    """
    try:
        if ip_address(address.partition("%")[0]).is_loopback:
            return True
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, port))  # For UDP, this sends nothing, but chooses the local address.
            return bool(sock.getsockname()[0] == address)
    except (OSError, ValueError):
        return False


def _cpu_model() -> str | None:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return f"{names[0]}, {len(names)} CPUs" if names else None


_EXAMPLES: Final = {
    "sut.boundary": "model engine",
    "sut.model": "Qwen2-7B-Instruct, bf16",
    "sut.software": "vLLM 0.9.1",
    "sut.protocol": "SSE",
    "sut.chunking": "one token per chunk",
    "sut.prefix_cache": True,
    "sut.max_batch": 256,
    "sut.notes": ["behind nginx"],
    "sut.start": ["vllm", "serve", "NAME"],
    "sut.hardware.accelerator": "H100 SXM",
    "sut.hardware.count": 1,
    "sut.hardware.memory": "80 GB",
    "sut.hardware.cpu": "2 x EPYC 9554",
    "sut.hardware.price_per_hour": 2.5,
    "sut.hardware.currency": "USD",
    "sut.tokenizer.name": "Qwen2 tokenizer",
    "sut.tokenizer.vocabulary": 151_936,
    "sut.tokenizer.source": "Qwen/Qwen2-7B-Instruct",
    "sut.tokenizer.counting": "native",
    "sut.tokenizer.special": "excluded",
    "sut.tokenizer.system_prompt": "included",
    "sut.tokenizer.tools": "no tools are used",
    "sut.guardrails.input_filter": False,
    "sut.guardrails.output_filter": False,
    "sut.guardrails.names": ["Llama Guard 3"],
    "sut.clock.placement": "remote",
    "sut.clock.synchronization": "NTP (chrony)",
    "sut.clock.accuracy": "2ms",
    "target.model": "NAME",
    "target.server": "vllm",
    "target.tokenizer": "models/qwen2",
    "target.headers": {"x-team": "perf"},
    "target.body": {"top_p": 1.0},
    "target.key_env": "OPENAI_API_KEY",
    "target.ca": "ca.pem",
    "target.metrics": "http://127.0.0.1:8000/metrics",
    "target.processes": 1,
    "target.endpoint": "chat.completions",
}
"""By key: example value for the comment in the bench file if the value was not detected."""
_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "target": BenchTarget,
    "sut": Sut,
    "sut.hardware": Hardware,
    "sut.tokenizer": SutTokenizer,
    "sut.guardrails": Guardrails,
    "sut.clock": SutClock,
}
_WIDTH: Final = 110
_ARMS: Final = """
# Configurations of the server that tests compare, each as what differs from [target]: another `url`,
# `headers`, members of the `body`, or a command that switches the server over (`apply`). All of them are sent
# requests at the `endpoint` of [target]. `llmtap bench list` says which test needs which.
#
# [arms.NAME]
# about = "what it is, for the report"
# headers = { x-cache = "off" }
# apply = ["./switch.sh", "cache-off"]

# Setup parameters that are to differ from the tests' own: `llmtap bench list TEST` has them all. Tests:
# {tests}
#
# [tests.ttft]
# requests = 10000
"""


def starter_text(detected: Detected) -> str:
    """Return the text of the bench file. Keys whose values were not detected are written as comments."""
    lines = [
        "# Bench file, written by `llmtap bench init`. Comments name the source of detected values.",
        "# Unknown declarations are comments, with the section of the IETF draft that asks for them.",
    ]
    lines += [line for note in detected.notes for line in _comment_lines(f"Noted: {note}.")]
    for table, kind in _TABLES.items():
        lines += ["", f"[{table}]", *_table_lines(table, kind, detected)]
    return "\n".join(lines) + "\n" + _ARMS.replace("{tests}", ", ".join(TESTS))


def _table_lines(table: str, kind: type[msgspec.Struct], detected: Detected) -> Iterator[str]:
    detected.add_fact("target.url", detected.url, "--target")
    for one in msgspec.structs.fields(kind):
        key = f"{table}.{one.name}"
        if key in _TABLES:
            continue
        if key in detected.facts:
            fact = detected.facts[key]
            yield f"{one.name} = {_toml_value(fact.value)}  # {fact.source}"
            continue
        yield from _comment_lines(_meaning_text(one.type))
        if key in detected.hints:
            yield from _comment_lines(f"found: {detected.hints[key]}")
        yield f"# {one.name} = {_toml_value(_EXAMPLES[key])}"


def _meaning_text(kind: Any) -> str:
    info = type_info(kind)
    assert isinstance(info, Metadata) and info.extra_json_schema is not None
    inner = get_args(kind)[0]
    choices = [
        c for one in (inner, *get_args(inner)) if "Literal" in str(get_origin(one)) for c in get_args(one)
    ]
    description: str = info.extra_json_schema["description"]
    return description + (f": {' | '.join(filter(None, choices))}" if choices else "")


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _toml_value(value: Any) -> str:
    """Format a value as TOML. JSON strings are valid TOML basic strings, except for the character DEL."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
