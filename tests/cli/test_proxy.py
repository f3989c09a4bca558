"""What the command says of a capture: where it goes, where its spool lies, and at which level."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import llmtap.cli.proxy  # noqa: F401  it adds the command
from llmtap.cli.main import app
from llmtap.supervisor import supervisor

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


def test_without_a_capture_none_is_told_of() -> None:
    assert len(run("--check").stdout.splitlines()) == 1


def test_a_check_tells_of_an_alarm_that_can_never_ring(tmp_path: Path) -> None:
    config = tmp_path / "llmtap.toml"
    config.write_text('[slo.batch]\nobjectives = "e2e:9s"\ntarget = 0.9\n')
    done = run("--check", "--config", str(config))
    assert done.exit_code == 0
    ok, warning = done.stdout.splitlines()
    assert ok.startswith("ok (config ")
    assert warning.startswith("warning: slo.batch: no page over 1h and 5m: a burn rate above 14.4 can't")


@pytest.mark.parametrize("captured", [True, False])
def test_the_first_line_of_a_proxy_names_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    class Announcing:
        """In the supervisor's place: it is up at once, and ends."""

        def __init__(self, _settings: object, _reload: object, announce: Any) -> None:
            self._announce = announce

        async def run(self) -> int:
            self._announce("127.0.0.1:8080", "127.0.0.1:9464")
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Announcing)
    done = run(*(("--capture", str(tmp_path)) if captured else ()))
    told = f"   capture: {tmp_path} (shape)" if captured else ""
    line = "llmtap: http://127.0.0.1:8080 -> http://127.0.0.1:8000   metrics: http://127.0.0.1:9464/metrics"
    assert (done.exit_code, done.stderr) == (0, f"{line}{told}\n")
