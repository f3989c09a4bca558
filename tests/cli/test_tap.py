"""The commands of the tap: checks that start nothing, a meter of its own, and rules from objectives."""

import asyncio
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import llmtap.cli.tap  # noqa: F401 (adds the commands to `app`)
from llmtap import native
from llmtap.capture.store.spool import LOCK_FILE
from llmtap.channel.frames import ACK
from llmtap.cli.main import app
from llmtap.config import load_settings
from llmtap.errors import ConfigError
from llmtap.meter.tenants import Tenants
from llmtap.protocol.http1 import parse_request_head
from llmtap.supervisor import supervisor
from tests.cli.traces import Call
from tests.support.servers.peer import play
from tests.support.servers.served import standalone_meter
from tests.support.traffic.relay_status import relay_status
from tests.support.traffic.tap_frames import Script

UPSTREAM = ("proxy", "--upstream", "http://127.0.0.1:8000")


def run(*args: str, **environ: str) -> Any:
    return CliRunner().invoke(app, [*UPSTREAM, *args], env={"LLMTAP_CONFIG": None, **environ})


def test_a_check_tells_where_a_capture_goes(tmp_path: Path) -> None:
    done = run("--check", "--capture", str(tmp_path / "c"))
    first, *rest = done.stdout.splitlines()
    assert (done.exit_code, first.startswith("ok (config ")) == (0, True)
    assert rest == [f"capture: {tmp_path}/c (level shape)", f"spool: {tmp_path}/c/.spool"]
    assert not (tmp_path / "c").exists()


def test_a_check_tells_of_the_spool_of_a_url_and_shows_no_key(tmp_path: Path) -> None:
    url = "s3://AKIAPLANTED:planted@bucket/x"
    done = run("--check", "--capture", url, "--set", "capture.level=none", XDG_STATE_HOME=str(tmp_path))
    _, to, spool = done.stdout.splitlines()
    assert to == "capture: s3://***@bucket/x (level none)"
    assert spool.startswith(f"spool: {tmp_path}/llmtap/spool-")
    assert "planted" not in done.output.lower()


def test_a_check_names_the_classes_that_judge_streams_only(tmp_path: Path) -> None:
    config = tmp_path / "llmtap.toml"
    config.write_text(
        '[slo.chat]\nobjectives = "ttft:500ms"\ntenants = ["a"]\n[slo.batch]\nobjectives = "ttft:1s e2e:9s"\n'
    )
    done = run("--check", "--config", str(config))
    _, told = done.stdout.splitlines()
    assert (done.exit_code, told.partition(":")[0]) == (0, "slo.chat")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_a_proxy_names_the_capture_at_its_start_and_missing_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool, compiled: bool
) -> None:
    class Announcing:
        """In the supervisor's place: it is up at once, and ends."""

        def __init__(self, _settings: object, _reload: object, announce: Any) -> None:
            self._announce = announce

        async def run(self) -> int:
            self._announce("127.0.0.1:8080", "127.0.0.1:9464")
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Announcing)
    monkeypatch.setattr(native, "REASON", "" if compiled else "the extension was not built")
    done = run(*(("--capture", str(tmp_path)) if captured else ()))
    told = f"   capture: {tmp_path} (shape)" if captured else ""
    line = "llmtap: http://127.0.0.1:8080 -> http://127.0.0.1:8000   metrics: http://127.0.0.1:9464/metrics"
    note = "" if compiled else f"llmtap: note: {native.missing_build()}\n"
    assert (done.exit_code, done.stderr) == (0, f"{line}{told}\n{note}")


LIMIT_S = 250.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name: a socket's path may not be long."""
    with tempfile.TemporaryDirectory(prefix="tap-") as name:
        yield Path(name)


async def guest(path: Path, name: str, *, running: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An app with the middleware, one exchange measured; one more under way if `running`."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    script = Script().hello(name, guest=True).status(relay_status(opened=1 + running)).stream(1)
    writer.write((script.request(2) if running else script).pack(1))
    assert await reader.readexactly(ACK.size) == ACK.pack(1)
    return reader, writer


def test_it_ends_at_once_and_in_order_whatever_its_guests_do(folder: Path) -> None:
    path = folder / "tap.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # left by a dead meter: it is replaced

    async def run() -> None:
        async with standalone_meter(path) as (seen, process):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == 0o600, "frames hold keys: the owner only"
            guests = [await guest(path, f"app-{i}", running=True) for i in range(3)]
            await seen.measured(3)
            assert await seen.told("/readyz") == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 120) == 0, "guests are not waited for"
            assert not path.exists()
            for reader, writer in guests:
                assert await reader.read() == b""
                writer.close()

    play(run(), LIMIT_S)


def test_a_path_that_is_in_use_is_not_taken(folder: Path) -> None:
    path = folder / "tap.sock"

    async def run() -> None:
        async with standalone_meter(path) as (seen, _):
            for args in (
                ("meter", "--listen-socket", str(path), "--admin", "127.0.0.1:0"),
                (
                    "proxy",
                    "--upstream",
                    "http://127.0.0.1:9",
                    "--listen",
                    "127.0.0.1:0",
                    "--admin",
                    "127.0.0.1:0",
                    "--set",
                    f"meter.socket={path}",
                ),
            ):
                second = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-P", "-m", "llmtap.cli", *args],
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                assert (second.returncode, second.stdout) == (2, "")
                assert f"another meter listens at {path}" in second.stderr
            _, writer = await guest(path, "app-1", running=False)
            await seen.measured(1)
            writer.close()

    play(run(), LIMIT_S)


def refused(*args: str) -> ConfigError:
    done: Any = CliRunner().invoke(app, ["meter", *args], env={"LLMTAP_CONFIG": None})
    assert isinstance(done.exception, ConfigError), done.output
    return done.exception


def test_what_cannot_be_is_told_before_anything_starts(folder: Path) -> None:
    file = folder / "file"
    file.touch()
    assert refused().place == "meter.socket"
    assert refused("--listen-socket", str(folder / "none/tap.sock")).place == "meter.socket (command line)"
    assert refused("--listen-socket", str(file)).problem == f"{file} exists and is not a socket"
    assert refused("--listen-socket", str(folder / ("x" * 120))).place == "meter.socket (command line)"
    path = ("--listen-socket", str(folder / "tap.sock"))
    assert refused(*path, "--set", "nonsense").place == "--set"
    arms = 'experiment.arms=[{"name": "a"}, {"name": "b", "headers": {"x-a": "b"}}]'
    experiment = refused(*path, "--set", arms, "--set", "experiment.enabled=true")
    assert experiment.place == "experiment.enabled (command line)"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = f"127.0.0.1:{taken.getsockname()[1]}"
        assert refused(*path, "--admin", admin).place == "meter.admin (--admin)"
    assert not os.path.exists(folder / "tap.sock"), "nothing is left behind"


def test_a_check_starts_nothing(folder: Path) -> None:
    args = ["meter", "--listen-socket", str(folder / "tap.sock"), "--check"]
    done = CliRunner().invoke(app, args, env={"LLMTAP_CONFIG": None})
    assert (done.exit_code, done.output.startswith("ok (config ")) == (0, True), done.output
    assert not (folder / "tap.sock").exists()


def test_a_check_accepts_the_capture_of_a_running_llmtap(folder: Path) -> None:
    """As before each SIGHUP; a start is refused."""
    spool = folder / "capture" / ".spool"
    spool.mkdir(parents=True)
    with (spool / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("1 1\n")
        lock.flush()
        capture = ("--capture", str(spool.parent))
        meter = ("meter", "--listen-socket", str(folder / "tap.sock"))
        for command in (UPSTREAM, meter):
            done = CliRunner().invoke(app, [*command, *capture, "--check"], env={"LLMTAP_CONFIG": None})
            assert (done.exit_code, done.output.startswith("ok (config ")) == (0, True), done.output
        assert refused(*meter[1:], *capture).place == "capture.to (command line)"


def test_what_can_never_ring_is_warned_of(tmp_path: Path, call: Call) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[slo.loose]\nobjectives = "ttft:1s"\ntarget = 0.9\n')
    code, out, err = call("slo", "generate", "--config", config)
    assert code == 0
    assert err.startswith("llmtap: warning: slo.loose: no page over 1h and 5m: ")
    assert err.count("\n") == 1
    assert yaml.safe_load(out)


def test_objectives_of_the_environment_are_read_as_the_proxy_does(
    monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("LLMTAP_SLO_GOLD_OBJECTIVES", "ttft:300ms")
    code, out, _ = call("slo", "generate", "--job", "x", "--runbooks", "https://wiki")
    assert code == 0
    assert 'llmtap_slo_events_total{job="x",slo="gold"}' in out
    assert "https://wiki/LlmtapDown.md" in out


def key_hash(config: Path, keys: str) -> Any:
    return CliRunner().invoke(
        app, ["key-hash", "--config", str(config)], input=keys, env={"LLMTAP_CONFIG": None}
    )


def test_key_hash_shows_the_names_that_the_meter_gives_to_keys(tmp_path: Path) -> None:
    config = tmp_path / "llmtap.toml"
    rules = '[tenants]\nsalt = "s"\nrules = [{ api_key = true }]\n'
    config.write_text(rules)
    tenants = Tenants(load_settings(config, {}, {}).tenants, "s")
    names = [
        tenants.identify(
            parse_request_head(b"POST / HTTP/1.1\r\nHost: a\r\n" + field + b"\r\n\r\n"), "/", dict
        )
        for field in (b"Authorization: Bearer sk-one", b"X-Api-Key: two")
    ]
    assert all(name.startswith("key-") for name in names)
    done = key_hash(config, "sk-one\n\nBearer sk-one\ntwo\n")
    assert (done.exit_code, done.stdout.split()) == (0, [names[0], *names])
    assert "sk-one" not in done.output
    config.write_text(f'{rules}names = {{ "{names[1]}" = "acme" }}\n')
    assert key_hash(config, "two").stdout == f"{names[1]}  acme\n"


def test_key_hash_warns_if_no_rule_reads_keys_and_refuses_without_a_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "llmtap.toml"
    config.write_text('[tenants]\nsalt = "s"\n')
    assert "no rule of [tenants] reads API keys" in key_hash(config, "k").stderr
    monkeypatch.setattr("llmtap.meter.tenants.host_salt", lambda: None)
    config.write_text("[tenants]\nrules = [{ api_key = true }]\n")
    done = key_hash(config, "k")
    assert isinstance(done.exception, ConfigError)
    assert done.exception.place == "tenants.salt"
