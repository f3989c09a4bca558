"""The checked-in rules are what the command makes, and promtool agrees with their tests, where it is."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmtap.cli.main import main
from llmtap.export.prometheus.catalogue import COUNTERS, HISTOGRAMS

HOUSE = Path(__file__).parents[2]
FOLDER = HOUSE / "deploy" / "prometheus"
UNPACKED = HOUSE / ".e2e" / "prometheus" / "package" / "usr" / "bin" / "promtool"
"""Where tests/e2e/prometheus.py has it."""
PROMTOOL = shutil.which("promtool") or (str(UNPACKED) if UNPACKED.exists() else None)
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool; tests/e2e/prometheus.py gets one")


def promtool(*args: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *args], cwd=FOLDER, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_those_of_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = tmp_path / "rules.yaml"
    inhibitions = tmp_path / "inhibitions.yaml"
    args = [
        "--config",
        str(HOUSE / "config" / "slo.toml"),
        "--out",
        str(made),
        "--inhibitions",
        str(inhibitions),
    ]
    monkeypatch.setattr(sys, "argv", ["llmtap", "slo", "generate", *args])
    with pytest.raises(SystemExit):
        main()
    for name, path in (("llmtap-rules.yaml", made), ("llmtap-inhibitions.yaml", inhibitions)):
        assert (FOLDER / name).read_text() == path.read_text(), (
            "run: llmtap slo generate --config config/slo.toml --out deploy/prometheus/llmtap-rules.yaml"
            " --inhibitions deploy/prometheus/llmtap-inhibitions.yaml"
        )


@needs_promtool
def test_promtool_has_nothing_against_them() -> None:
    promtool("check", "rules", "llmtap-rules.yaml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")


@needs_promtool
def test_what_is_planted_rings_when_theory_says_and_clears() -> None:
    assert "SUCCESS" in promtool("test", "rules", "tests.yaml")


@needs_promtool
@pytest.mark.parametrize(
    "args", [("check", "rules", "fleet-rules.yaml"), ("test", "rules", "fleet-tests.yaml")]
)
def test_promtool_agrees_with_the_rules_of_a_fleet(args: tuple[str, ...]) -> None:
    promtool(*args)


def test_what_is_summed_is_what_we_expose_and_no_quantile_is_of_a_quantile() -> None:
    (group,) = yaml.safe_load((FOLDER / "fleet-rules.yaml").read_text())["groups"]
    of_tenants = {family.name for family in HISTOGRAMS.values()} | {
        f"{c.name}_total" for c in COUNTERS.values()
    }
    of_relays = {"llmtap_relay_exchanges_total", "llmtap_tap_dropped_exchanges_total"}
    recorded = {rule["record"] for rule in group["rules"]}
    for rule in group["rules"]:
        read = re.findall(r"(?<![\w:])llmtap_\w+", rule["expr"])
        assert {name.removesuffix("_bucket") for name in read} <= of_tenants | of_relays, rule["record"]
        if "histogram_quantile" in rule["expr"]:
            (source,) = re.findall(r"fleet:[\w:]+", rule["expr"])
            assert source in recorded and "_bucket:" in source
            assert "sum by (job, namespace, model, le)" in rule["expr"]
