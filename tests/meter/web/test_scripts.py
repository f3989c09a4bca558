"""The scripts of the page, as far as they can be judged without a browser: they parse, imports are right.

Nobody needs Node for it; where there is one, it parses every module.
"""

import re
from pathlib import Path

import pytest

from llmtap.exchange.outcome import FAILED, Outcome
from llmtap.meter.admin.server import METRICS_MODULE, metrics_module

PACKAGE = Path(__file__).parents[3] / "llmtap"
STATIC, PLOT = PACKAGE / "meter" / "admin" / "static", PACKAGE / "report" / "plot.js"
PAGE = PLOT.with_name("curves.js")
"""Of report pages; `plot.js` stands before it in the same script."""
SCRIPTS = [*sorted(STATIC.glob("*.js")), PLOT]
IMPORT = re.compile(r"^import \{([^}]*)\} from \"\./([\w.]+)\";", re.M)
EXPORT = re.compile(r"^export (?:async )?(?:function\*?|class|const|let) (\w+)", re.M)
DECLARED = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.M)


def names(text: str) -> list[str]:
    """What is between the braces of an import."""
    return [name for name in re.split(r"[\s,]+", text) if name]


def text_of(module: str) -> str:
    if module == METRICS_MODULE:
        return metrics_module().decode()
    return (PLOT if module == PLOT.name else STATIC / module).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_import_is_exported_there_and_used_here(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    found = IMPORT.findall(text)
    assert len(found) == len(re.findall(r"^import\b", text, re.M)), "an import that is not understood"
    rest = IMPORT.sub("", text)
    for wanted, module in found:
        exported = set(EXPORT.findall(text_of(module)))
        for name in names(wanted):
            assert name in exported, f"{module} exports no {name}"
            assert re.search(rf"\b{name}\b", rest), f"{name} of {module} is not used"
    result = [name for wanted, _ in found for name in names(wanted)]
    assert len(result) == len(set(result)), "imported twice"


def test_the_page_and_the_package_agree_which_outcomes_are_failures() -> None:
    found = re.search(r"FAILED = new Set\(\[(.*?)\]\)", (STATIC / "format.js").read_text("utf-8"), re.S)
    assert found and set(re.findall(r'"(\w+)"', found[1])) == {outcome.value for outcome in FAILED}
    fine = {Outcome.COMPLETE, Outcome.REFUSED, Outcome.CLIENT_CANCELLED, Outcome.CLIENT_ERROR}
    assert fine == set(Outcome) - FAILED


def test_what_a_module_declares_somebody_uses() -> None:
    texts = {script.name: script.read_text(encoding="utf-8") for script in [*SCRIPTS, PAGE]}
    for module, text in texts.items():
        exported = set(EXPORT.findall(text))
        others = " ".join(other for name, other in texts.items() if name != module)
        for name in DECLARED.findall(text):
            uses = len(re.findall(rf"\b{name}\b", text)) - 1
            assert uses or (name in exported and re.search(rf"\b{name}\b", others)), f"{module}: {name}"
            if name in exported:
                assert re.search(rf"\b{name}\b", others), f"{module} exports {name}, and nobody imports it"
