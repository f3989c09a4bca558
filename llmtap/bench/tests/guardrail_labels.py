"""False positives and false negatives of each guardrail configuration, for the test `guardrail-overhead`.

`send_labelled` sends the requests of a labelled trace once to each configuration, in a closed loop, and
compares the refusals with the labels of the requests (`metrics/refusals.py`); labels are not sent. The IETF
draft uses only benign content (5.10.2), so this part is llmtap's own.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from llmtap.bench.run.pace import ExpectedLoad
from llmtap.bench.run.session import BenchSession, Load, make_load
from llmtap.bench.run.test import ReportTable
from llmtap.errors import ConfigError
from llmtap.report.labels import LABELS_TITLE, labels_table

SLOTS: Final = 8
"""Number of concurrent labelled requests. It is low, so that no filter refuses because it is overloaded."""


def labelled_load(session: BenchSession, trace: str) -> Load:
    """Return the load of all rows of a labelled trace. Raises ConfigError if no row has a label."""
    load = make_load(trace, seed=session.seed, slots=SLOTS, counting=session.target.counting)
    labels = load.plan.requests.labels
    if not any(labels):
        raise ConfigError(
            "labelled",
            f"no row of {trace} has a label",
            'such as {"prompt": "...", "label": "should-refuse"} in each line',
        )
    # Add a digest to the fingerprint of the load: a changed prompt of equal length must be measured again.
    digest = hashlib.sha256(repr(labels).encode())
    for body in load.plan.requests.bodies:
        digest.update(body)
    load.about["labelled"] = f"{Path(trace).name} sha256:{digest.hexdigest()[:16]}"
    return load


async def send_labelled(
    session: BenchSession, trace: str, arms: Sequence[str], warm_by: Load
) -> dict[str, Any]:
    """Send a trace to each configuration; return by configuration its refusals, compared with the labels."""
    load = labelled_load(session, trace)
    results = {}
    for i, arm in enumerate(arms):
        session.report_remaining(f"{len(arms) - i} of {len(arms)} labelled loads")
        measurement = await session.measure(f"labelled/{arm}", load, arm=arm, warm_by=warm_by)
        results[arm] = measurement.result["labels"]
    return results


def labelled_table(labels: Mapping[str, Any], names: Mapping[str, str]) -> ReportTable | None:
    """Return the table of a result of `send_labelled`; `names`: by arm, its name in tables. None if empty."""
    table = labels_table({names[arm]: one for arm, one in labels.items()}, "Configuration", LABELS_TITLE)
    if table is None:
        return None
    return ReportTable(table.caption, list(table.heads), [list(row) for row in table.rows])


def expected_labelled(session: BenchSession, trace: str, arms: int) -> list[ExpectedLoad]:
    """Return the labelled loads that the test is expected to send. `arms`: number of configurations."""
    requests = len(labelled_load(session, trace).plan.requests)
    return [ExpectedLoad(requests, slots=SLOTS)] * arms
