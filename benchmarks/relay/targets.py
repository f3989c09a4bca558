"""What is measured: each proxy's configuration, command and quirks.

All stand between the same client and the same server, with one worker, streaming unbuffered, access logs off:
what somebody would do who wants them fast. A target that is not installed is skipped with a reason.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
REPOSITORY = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of one run: the server behind the target, the target, and one it may use for itself."""

    upstream: int
    listen: int
    admin: int


@dataclass(frozen=True, slots=True)
class Command:
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """One way from client to server.

    `rebuilds_json` says that the events do not come through as sent: stamps travel in the text, and events of
    the gateway's own making are no fault. `streams_max` bounds the load to one it can keep; None: any.
    """

    name: str
    prepare: Callable[[Path, Ports], Command] | None  # None: nothing between client and server
    find: Callable[[], str | None] = lambda: None  # its reason to be absent, None if it is there
    version: tuple[str, ...] = ()
    headers: Callable[[Ports], list[str]] = lambda ports: []
    rebuilds_json: bool = False
    streams_max: int | None = None
    ready_within_s: float = 20


def _needs(program: str, hint: str) -> Callable[[], str | None]:
    return lambda: None if shutil.which(program) else f"no {program} on PATH ({hint})"


def _nginx(folder: Path, ports: Ports) -> Command:
    (folder / "nginx.conf").write_text(f"""
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000;
    tcp_nodelay on;
    upstream server_behind {{
        server 127.0.0.1:{ports.upstream};
        keepalive 512;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{ports.listen} backlog=4096;
        location / {{
            proxy_pass http://server_behind;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_read_timeout 3600s;
        }}
    }}
}}
""")
    # -e: before the configuration is read, nginx would log to a file outside our folder
    return Command(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"])


def _haproxy(folder: Path, ports: Ports) -> Command:
    (folder / "haproxy.cfg").write_text(f"""
global
    nbthread 1
    maxconn 6000
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    option http-no-delay
    http-reuse always
frontend front
    bind 127.0.0.1:{ports.listen} backlog 4096
    default_backend back
backend back
    server one 127.0.0.1:{ports.upstream}
""")
    # -db: stay in the foreground, one process
    return Command(["haproxy", "-db", "-f", str(folder / "haproxy.cfg")])


_ENVOY = "type.googleapis.com/envoy.extensions.filters"


def _envoy(folder: Path, ports: Ports) -> Command:
    (folder / "envoy.yaml").write_text(f"""
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {ports.listen}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": {_ENVOY}.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          generate_request_id: false
          stream_idle_timeout: 3600s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                route: {{cluster: back, timeout: 0s}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": {_ENVOY}.http.router.v3.Router}}
  clusters:
  - name: back
    type: STATIC
    circuit_breakers:
      thresholds: [{{max_connections: 8192, max_pending_requests: 8192, max_requests: 8192}}]
    load_assignment:
      cluster_name: back
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {ports.upstream}}}}}}}
""")
    arguments = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    return Command([str(BUILD / "envoy-venv/bin/envoy"), "-c", str(folder / "envoy.yaml"), *arguments])


def _find_in(name: str, program: str) -> Callable[[], str | None]:
    """Return the check whether an installed package's program is there."""
    path = BUILD / f"{name}-venv/bin/{program}"
    return lambda: None if path.exists() else f"not installed (run.py --install {name})"


def _version_in(name: str) -> tuple[str, ...]:
    """Return the command that prints an installed package's version."""
    code = f"import importlib.metadata as m; print({name!r}, m.version({name!r}))"
    return (str(BUILD / f"{name}-venv/bin/python"), "-c", code)


def _router(name: str, *program: str) -> Callable[[Path, Ports], Command]:
    """Return the command of vllm-router or of sglang-router, which share their options."""

    def prepare(folder: Path, ports: Ports) -> Command:
        arguments = [
            "--host=127.0.0.1",
            f"--port={ports.listen}",
            "--worker-urls",
            f"http://127.0.0.1:{ports.upstream}",
            "--policy=round_robin",
            "--disable-retries",
            "--disable-circuit-breaker",
            "--log-level=error",
            f"--prometheus-port={ports.admin}",
            "--health-check-interval-secs=3600",
        ]
        return Command([str(BUILD / f"{name}-venv/bin" / program[0]), *program[1:], *arguments])

    return prepare


def _llmtap_program() -> str | None:
    for candidate in (REPOSITORY / ".venv/bin/llmtap", Path(sys.executable).parent / "llmtap"):
        if candidate.exists():
            return str(candidate)
    return shutil.which("llmtap")


def llmtap(*more: str, program: str | None = None) -> Callable[[Path, Ports], Command]:
    def prepare(folder: Path, ports: Ports) -> Command:
        command = program or _llmtap_program()
        assert command, "find() comes before prepare()"
        addresses = [
            f"--{name}=127.0.0.1:{port}" for name, port in (("listen", ports.listen), ("admin", ports.admin))
        ]
        return Command(
            [command, "proxy", "--upstream", f"http://127.0.0.1:{ports.upstream}", *addresses, *more]
        )

    return prepare


def _llmtap_pair(folder: Path, ports: Ports) -> Command:
    """Both sides of a gateway that does nothing: the front relay sends its requests to the back relay."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        back = free.getsockname()[1]
    sides = {
        "pair.listen": f"127.0.0.1:{back}",
        "pair.upstream": f"http://127.0.0.1:{ports.upstream}",
        "relay.request_id": "make",
    }
    settings = [part for key, value in sides.items() for part in ("--set", f"{key}={value}")]
    return llmtap(*settings)(folder, replace(ports, upstream=back))


def find_llmtap() -> str | None:
    return None if _llmtap_program() else "no llmtap in .venv or on PATH (make setup)"


# LiteLLM does not start without a key, so each run of the benchmark makes one up for its own instance.
LITELLM_KEY = f"sk-{secrets.token_hex(16)}"


def _litellm(folder: Path, ports: Ports) -> Command:
    (folder / "litellm.yaml").write_text(f"""
model_list:
  - model_name: sim-model
    litellm_params:
      model: openai/sim-model
      api_base: http://127.0.0.1:{ports.upstream}/v1
      api_key: none
litellm_settings:
  num_retries: 0
  turn_off_message_logging: true
""")
    program = BUILD / "litellm-venv/bin/litellm"
    arguments = ["--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(ports.listen)]
    # Both keep it from calling home at start; nothing but loopback is wanted here.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}
    env["LITELLM_MASTER_KEY"] = LITELLM_KEY
    return Command([str(program), *arguments, "--num_workers", "1", "--telemetry", "False"], env)


PORTKEY = BUILD / "portkey/node_modules/@portkey-ai/gateway"


def _portkey(folder: Path, ports: Ports) -> Command:
    return Command(["node", str(PORTKEY / "build/start-server.js"), f"--port={ports.listen}", "--headless"])


def _find_portkey() -> str | None:
    if not shutil.which("node"):
        return "no node on PATH"
    return None if PORTKEY.exists() else "not installed (run.py --install portkey)"


def _portkey_headers(ports: Ports) -> list[str]:
    # The client carries the configuration, as Portkey's own SDK does.
    return [
        "x-portkey-provider: openai",
        f"x-portkey-custom-host: http://127.0.0.1:{ports.upstream}/v1",
        "Authorization: Bearer none",
    ]


_LLMTAP_VERSION = ("{llmtap}", "--version")

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("direct", None),
        Target("nginx", _nginx, _needs("nginx", "Debian: nginx-light"), ("nginx", "-v")),
        Target("haproxy", _haproxy, _needs("haproxy", "Debian: haproxy"), ("haproxy", "-v")),
        Target("llmtap", llmtap(), find_llmtap, _LLMTAP_VERSION),
        # Into the target's own folder, which goes when the run is over.
        Target("llmtap-capture", llmtap("--capture", "capture"), find_llmtap, _LLMTAP_VERSION),
        Target("llmtap-thread", llmtap("--set", "relay.thread=true"), find_llmtap, _LLMTAP_VERSION),
        Target("llmtap-mono", llmtap("--set", "relay.clock=mono"), find_llmtap, _LLMTAP_VERSION),
        Target("llmtap-pair", _llmtap_pair, find_llmtap, _LLMTAP_VERSION),
        Target(
            "envoy",
            _envoy,
            _find_in("envoy", "envoy"),
            (str(BUILD / "envoy-venv/bin/envoy"), "--version"),
        ),
        Target(
            "vllm-router",
            _router("vllm-router", "vllm-router"),
            _find_in("vllm-router", "vllm-router"),
            _version_in("vllm-router"),
        ),
        Target(
            "sglang-router",
            _router("sglang-router", "smg", "launch"),
            _find_in("sglang-router", "smg"),
            _version_in("sglang-router"),
        ),
        Target(
            "litellm",
            _litellm,
            _find_in("litellm", "litellm"),
            (str(BUILD / "litellm-venv/bin/litellm"), "--version"),
            headers=lambda ports: [f"Authorization: Bearer {LITELLM_KEY}"],
            rebuilds_json=True,
            streams_max=20,
            ready_within_s=90,
        ),
        Target(
            "portkey",
            _portkey,
            _find_portkey,
            (
                "node",
                "-p",
                f"'portkey ' + require('{PORTKEY}/package.json').version + ' on node ' + process.version",
            ),
            headers=_portkey_headers,
            rebuilds_json=True,
        ),
    )
}


def add_other_llmtap(program: Path) -> None:
    """Add the target `llmtap-other`: an llmtap of another commit, measured in the same rounds."""
    command = str(program.absolute())
    TARGETS["llmtap-other"] = Target(
        "llmtap-other",
        llmtap(program=command),
        lambda: None if program.exists() else f"no program {command}",
        (command, "--version"),
    )


def installed(target: Target) -> str | None:
    """The reason why this target cannot run here; None if it can."""
    return target.find()


def version_command(target: Target) -> list[str]:
    """The command that prints the target's version; empty if there is none to ask."""
    return [part.replace("{llmtap}", _llmtap_program() or "llmtap") for part in target.version]


def environment(command: Command) -> dict[str, str]:
    """The target's environment: ours, without what could lead it away from loopback or change its work."""
    drop = {"http_proxy", "https_proxy", "all_proxy", "no_proxy", "pythonpath", "pythonhome", "virtual_env"}
    kept = {name: value for name, value in os.environ.items() if name.lower() not in drop}
    return kept | command.env
