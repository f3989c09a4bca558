"""Rules for a fleet's figures: promtool agrees, where it is; what they sum is what we expose."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from llmtap.export.prometheus.series import COUNTERS, HISTOGRAMS

HOUSE = Path(__file__).parents[2]
FOLDER = HOUSE / "deploy" / "prometheus"
UNPACKED = HOUSE / ".e2e" / "prometheus" / "package" / "usr" / "bin" / "promtool"
PROMTOOL = shutil.which("promtool") or (str(UNPACKED) if UNPACKED.exists() else None)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool; tests/e2e/prometheus.py gets one")
@pytest.mark.parametrize(
    "args", [("check", "rules", "fleet-rules.yaml"), ("test", "rules", "fleet-tests.yaml")]
)
def test_promtool_agrees(args: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *args], cwd=FOLDER, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


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
