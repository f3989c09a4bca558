"""Manifests, compose and the unit name the ports, paths and times that the program has."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtap import __version__
from llmtap.capture.options import CaptureOptions
from llmtap.clock import ManualClock
from llmtap.config import help_by_key, load_settings
from llmtap.meter.admin.server import admin_app
from llmtap.meter.options import MeterOptions
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.process import RECORDER_S
from llmtap.net.listener import parse_address
from llmtap.supervisor.supervisor import GRACE_S, check_settings
from llmtap.units import parse_duration_ns
from llmtap.vantage.relay.options import RelayOptions

HOUSE = Path(__file__).parents[2]
DEPLOY = HOUSE / "deploy"
HTTP, ADMIN = (parse_address(text, "x")[1] for text in (RelayOptions().listen, MeterOptions().admin))
END_S = GRACE_S + RECORDER_S
"""What the supervisor needs after the drain, at most."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods(name: str) -> list[dict[str, Any]]:
    return [d["spec"]["template"]["spec"] for d in documents(name) if d["kind"] == "Deployment"]


def taps(name: str) -> list[dict[str, Any]]:
    found = [c for pod in pods(name) for c in (*pod.get("initContainers", []), *pod["containers"])]
    return [container for container in found if container["name"] == "llmtap"]


STATE = "/var/lib/llmtap"
MANIFESTS = ["kubernetes/standalone.yaml", "kubernetes/sidecar.yaml"]


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda file: file.name)
def test_every_yaml_file_parses(file: Path) -> None:
    if "templates" not in file.parts:
        assert list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("name", MANIFESTS)
def test_ports_are_the_programs(name: str) -> None:
    for tap in taps(name):
        assert {p["name"]: p["containerPort"] for p in tap["ports"]} == {"http": HTTP, "admin": ADMIN}
    for service in (d for d in documents(name) if d["kind"] == "Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ("http", "admin")


@pytest.mark.parametrize("name", MANIFESTS)
def test_probes_ask_for_paths_that_the_admin_port_answers_without_a_token(name: str) -> None:
    routes = {
        r.resource.canonical
        for r in admin_app(ExchangePipeline(MeterOptions(), ManualClock())).router.routes()
        if r.resource
    }
    for tap in taps(name):
        asked = tap["startupProbe"]["httpGet"]
        assert asked["port"] == "admin"
        assert asked["path"] in routes
        assert asked["path"] in ("/healthz", "/readyz")


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hung_meter_keeps_its_pod_in_service(name: str) -> None:
    for tap in taps(name):
        for probe in ("readinessProbe", "livenessProbe"):
            assert tap[probe]["tcpSocket"] == {"port": "http"}, "the meter answers at the admin port"
            assert "httpGet" not in tap[probe]


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_are_more_patient_than_the_proxy(name: str) -> None:
    text = (DEPLOY / name).read_text()
    drain = re.search(r'drain_timeout ?= ?"?([0-9]+s)', text)
    sleep = re.search(r"time\.sleep\((\d+)\)", text)
    assert drain is not None
    assert sleep is not None
    drain_s = parse_duration_ns(drain[1]) / 1e9
    for pod in pods(name):
        assert pod["terminationGracePeriodSeconds"] > drain_s + int(sleep[1]) + END_S


@pytest.mark.parametrize("name", MANIFESTS)
def test_containers_have_no_privileges_and_no_writable_root(name: str) -> None:
    for tap in taps(name):
        assert tap["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert any(mount["mountPath"] == "/run/llmtap" for mount in tap["volumeMounts"])
        assert tap["image"] == f"llmtap:{__version__}"


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_know_nothing_of_the_cluster(name: str) -> None:
    for pod in pods(name):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "LLMTAP_PORT of a service called llmtap"


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_spool_can_be_written_and_evicts_no_pod(name: str) -> None:
    for pod, tap in zip(pods(name), taps(name), strict=True):
        mounts = {mount["mountPath"]: mount["name"] for mount in tap["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        size = volumes[mounts[STATE]]["emptyDir"]["sizeLimit"].removesuffix("Gi")
        assert int(size) << 30 > CaptureOptions().total_bytes + CaptureOptions().rotate_bytes


@pytest.mark.parametrize("name", MANIFESTS)
def test_variables_are_keys_of_the_configuration(name: str) -> None:
    known = {f"LLMTAP_{key.replace('.', '_')}".upper() for key in help_by_key()}
    for tap in taps(name):
        names = {variable["name"] for variable in tap["env"] if not variable["name"].startswith("OTEL_")}
        assert names <= known | {"POD_NAME"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_receivers_can_tell_pods_apart(name: str) -> None:
    for tap in taps(name):
        by_name = {variable["name"]: variable for variable in tap["env"]}
        assert by_name["POD_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        assert by_name["OTEL_RESOURCE_ATTRIBUTES"]["value"] == "service.instance.id=$(POD_NAME)"
        assert list(by_name).index("POD_NAME") < list(by_name).index("OTEL_RESOURCE_ATTRIBUTES"), (
            "or not replaced"
        )


def test_the_config_map_is_one_that_the_proxy_takes(tmp_path: Path) -> None:
    (text,) = [d["data"]["llmtap.toml"] for d in documents(MANIFESTS[0]) if d["kind"] == "ConfigMap"]
    file = tmp_path / "llmtap.toml"
    file.write_text(text)
    settings = load_settings(file, {}, {})
    assert settings.relay.upstream == "http://gateway:4000"
    assert settings.relay.drain_timeout == 120 * 10**9


@pytest.mark.parametrize(
    ("name", "service"), [(MANIFESTS[0], "llmtap-admin"), (MANIFESTS[1], "engine-llmtap-admin")]
)
def test_scrapes_find_the_admin_service(name: str, service: str) -> None:
    (monitor,) = documents("kubernetes/servicemonitor.yaml")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    found = [
        d
        for d in documents(name)
        if d["kind"] == "Service" and wanted.items() <= d["metadata"]["labels"].items()
    ]
    assert [d["metadata"]["name"] for d in found] == [service]
    (pod,) = (d["spec"]["template"] for d in documents(name) if d["kind"] == "Deployment")
    assert found[0]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in found[0]["spec"]["ports"]}
    assert found[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "llmtap", "the rules' job"


# ---------------------------------------------------------------- compose and image


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_compose_mounts_files_that_are_there() -> None:
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_compose_waits_longer_than_the_drain() -> None:
    tap = compose()["services"]["llmtap"]
    assert parse_duration_ns(tap["stop_grace_period"]) / 1e9 > RelayOptions().drain_timeout / 1e9 + END_S
    assert f"{HTTP}:{HTTP}" in tap["ports"]
    assert f"127.0.0.1:{ADMIN}:{ADMIN}" in tap["ports"]


def test_compose_gives_prometheus_the_token_of_the_tap() -> None:
    services, secrets = compose()["services"], compose()["secrets"]
    variable = secrets["llmtap-admin-token"]["environment"]
    assert services["llmtap"]["environment"]["LLMTAP_METER_ADMIN_TOKEN"].startswith(f"${{{variable}:?")
    (job,) = documents("prometheus/prometheus.yml")[0]["scrape_configs"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/llmtap-admin-token"
    assert job["static_configs"] == [{"targets": [f"llmtap:{ADMIN}"]}]


def test_compose_can_write_secrets_of_the_environment() -> None:
    services, secrets = compose()["services"], compose()["secrets"]
    for service in services.values():
        if any("environment" in secrets[name] for name in service.get("secrets", [])):
            assert not service["read_only"], "Compose refuses that"
            assert service["cap_drop"] == ["ALL"]


def test_compose_keeps_samples_for_the_longest_window() -> None:
    command = " ".join(compose()["services"]["prometheus"]["command"])
    kept = re.search(r"retention\.time=(\d+)d", command)
    assert kept is not None
    assert int(kept[1]) > 30


def test_the_image_is_small_rootless_and_checks_itself() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    froms = re.findall(r"^FROM (.+)$", text, re.MULTILINE)
    assert froms == ["python:${PYTHON}-slim AS build", "python:${PYTHON}-slim"]
    last = text.rsplit("\nFROM ", 1)[1]
    assert "USER 65532:65532" in last
    assert f"http://127.0.0.1:{ADMIN}/healthz" in last
    assert f"EXPOSE {HTTP} {ADMIN}" in last
    assert f"XDG_STATE_HOME={Path(STATE).parent} " in last
    assert f"-o 65532 -g 65532 {STATE}\n" in last
    assert f"LLMTAP_RELAY_LISTEN=0.0.0.0:{HTTP}" in last
    assert 'ENTRYPOINT ["llmtap"]' in last, "no shell in between, so that signals arrive"
    told = dict(re.findall(r"(LLMTAP_\w+)=(\S+)", last.split("\nENV ")[1].split("\nRUN ")[0]))
    told |= {"LLMTAP_METER_ADMIN_TOKEN": "t", "LLMTAP_RELAY_UPSTREAM": "http://gateway:4000"}
    check_settings(load_settings(None, told, {}))
    for copied in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE):
        for name in copied.split():
            assert (HOUSE / name).exists(), name


def test_the_image_is_built_of_what_it_copies_and_of_nothing_else() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copies = re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE)
    copied = {name for names in copies for name in names.split()}
    rows = (HOUSE / ".dockerignore").read_text().splitlines()
    rules = [row for row in rows if not row.startswith("#")]
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == copied


# ---------------------------------------------------------------- systemd

UNIT = DEPLOY / "systemd" / "llmtap.service"


def unit(file: Path = UNIT) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_is_more_patient_than_the_proxy() -> None:
    found = unit()
    assert float(found["TimeoutStopSec"][0]) > RelayOptions().drain_timeout / 1e9 + END_S
    assert (found["KillMode"], found["Type"]) == (["mixed"], ["notify"])
    assert int(found["LimitNOFILE"][0]) > 2 * RelayOptions().connections


@pytest.mark.parametrize(
    ("name", "address", "socket"),
    [
        ("llmtap", RelayOptions().listen, "listen"),
        ("llmtap-admin", MeterOptions().admin, "admin"),
    ],
)
def test_its_sockets_are_those_that_it_would_open(name: str, address: str, socket: str) -> None:
    found = unit(UNIT.with_name(f"{name}.socket"))
    assert found["ListenStream"] == [address]
    assert (found["FileDescriptorName"], found["Service"]) == ([socket], [UNIT.name])


def test_the_unit_gives_everything_away() -> None:
    found = unit()
    assert found["DynamicUser"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]
    assert found["CapabilityBoundingSet"] == [""]
    assert found["NoNewPrivileges"] == ["yes"]


METER = UNIT.with_name("llmtap-meter.service")


def test_the_meters_unit_gives_away_what_the_proxys_does_but_the_apps_user_and_memory() -> None:
    found, proxys = unit(METER), unit()
    hardening = [key for key in proxys if key.startswith(("Protect", "Private", "Restrict", "SystemCall"))]
    assert len(hardening) > 15
    for key in (*hardening, "UMask", "CapabilityBoundingSet", "NoNewPrivileges", "MemoryDenyWriteExecute"):
        assert found[key] == proxys[key], key
    assert "User" in found, "the app's own: the socket is 0600"
    assert not found.keys() & {"DynamicUser", "RemoveIPC"}
    assert float(found["TimeoutStopSec"][0]) > RECORDER_S


def test_the_meters_unit_listens_where_apps_are_told_to_deliver(tmp_path: Path) -> None:
    found = unit(METER)
    (start,), (check,) = found["ExecStart"], found["ExecStartPre"]
    assert check == f"{start} --check"
    assert found["RuntimeDirectory"] == ["llmtap"]
    assert found["RuntimeDirectoryMode"] == ["0700"]
    assert "--listen-socket /run/llmtap/tap.sock " in start
    page = (HOUSE / "docs/howto/middleware.md").read_text()
    assert 'LlmtapMiddleware, socket="/run/llmtap/tap.sock"' in page
    here = check.replace("/run/llmtap", str(tmp_path)).replace("/etc/llmtap", str(HOUSE / "config"))
    done = subprocess.run(
        [sys.executable, "-m", "llmtap.cli", *here.split()[1:]], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout[:2]) == (0, "ok"), done.stderr


def test_the_spool_of_the_unit_lies_in_its_state_directory() -> None:
    found = unit()
    assert "XDG_STATE_HOME=/var/lib" in found["Environment"]
    assert found["StateDirectory"] == ["llmtap"], "what is below $XDG_STATE_HOME"


def with_credentials(text: str) -> str:
    """The unit with the lines that its comment offers."""
    return re.sub(r"^#(LoadCredential=|Environment=)", r"\1", text, flags=re.MULTILINE)


def test_keys_of_the_credentials_are_those_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "llmtap.service"
    file.write_text(with_credentials(UNIT.read_text()))
    found = unit(file)
    names = {text.partition(":")[0] for text in found["LoadCredential"]}
    told = dict(text.split("=", 1) for text in found["Environment"] if "%d" in text)
    assert {value.removeprefix("%d/") for value in told.values()} == names
    assert told.keys() == {"LLMTAP_RELAY_TLS_KEY", "LLMTAP_METER_ADMIN_TLS_KEY"}
    assert {"relay.tls_key", "meter.admin_tls_key"} <= set(help_by_key())


@pytest.mark.machine
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs the program systemd-analyze")
@pytest.mark.parametrize("edited", [str, with_credentials])
def test_systemd_has_nothing_against_the_units(tmp_path: Path, edited: Callable[[str], str]) -> None:
    services = []
    for file in (UNIT, METER):
        # It looks whether the program is there.
        services.append(tmp_path / file.name)
        services[-1].write_text(edited(file.read_text()).replace("/opt/llmtap/bin/llmtap", "/bin/true"))
    sockets = [shutil.copy(UNIT.with_name(f"{name}.socket"), tmp_path) for name in ("llmtap", "llmtap-admin")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, (*services, *sockets))],
        capture_output=True,
        text=True,
        timeout=200,
    )
    ours = [line for line in done.stderr.splitlines() if "llmtap" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


@pytest.mark.parametrize("name", ["watch-daemonset", "watch-sidecar", "systemd"])
def test_the_watching_examples_start_with_one_capability(name: str) -> None:
    if name == "systemd":
        unit = (DEPLOY / "systemd" / "llmtap-watch.service").read_text()
        (line,) = re.findall(r"^ExecStart=/opt/llmtap/bin/llmtap watch (.*)$", unit, re.M)
        args = [*line.replace("/etc/llmtap", str(HOUSE / "config")).split(), "--port", "8000"]
        assert {"CapabilityBoundingSet=CAP_NET_RAW", "AmbientCapabilities=CAP_NET_RAW"} <= set(
            unit.splitlines()
        )
    else:
        (pod,) = [d["spec"]["template"]["spec"] for d in documents(f"kubernetes/{name}.yaml")]
        (tap,) = [
            c for c in (*pod.get("initContainers", []), *pod["containers"]) if c["name"].startswith("llmtap")
        ]
        assert tap["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_RAW"]}
        command, *args = tap["args"]
        assert command == "watch"
        args = ["lo" if arg == "cni0" else arg for arg in args]  # the interface of a cluster's node
    argv = [sys.executable, "-P", "-m", "llmtap.cli", "watch", *args, "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=HOUSE, timeout=60)
    assert done.returncode == 0, done.stderr
