"""Completes the bill of materials that `make sbom` makes: licences that packages name in words of their own,
and no addresses to fetch from, which are of whoever installs.

    .venv/bin/python deploy/sbom.py .venv-runtime

cyclonedx-py takes SPDX expressions and classifiers over. A few packages have neither, and say in the older
field `License` what they are under: that is added as it stands there.
"""

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

BILL = Path(__file__).parent / "sbom.cdx.json"


def main() -> int:
    (environment,) = sys.argv[1:]
    folders = [str(folder) for folder in Path(environment).glob("lib/python*/site-packages")]
    said = {found.metadata["Name"]: found.metadata["License"] for found in distributions(path=folders)}
    bill = json.loads(BILL.read_text(encoding="utf-8"))
    for component in bill["components"]:
        name = said.get(component["name"])
        if not component.get("licenses") and name:
            named = {"acknowledgement": "declared", "name": name.splitlines()[0]}
            component["licenses"] = [{"license": named}]
    _without_places(bill)
    BILL.write_text(json.dumps(bill, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _without_places(part: Any) -> None:
    """Takes references of the type `distribution` out, wherever they stand."""
    if isinstance(part, dict):
        if "externalReferences" in part:
            kept = [one for one in part["externalReferences"] if one["type"] != "distribution"]
            part["externalReferences"] = kept
        for inner in part.values():
            _without_places(inner)
    elif isinstance(part, list):
        for inner in part:
            _without_places(inner)


if __name__ == "__main__":
    sys.exit(main())
