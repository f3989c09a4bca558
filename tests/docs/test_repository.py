"""Pages of elsewhere lead on within the site, and say the file where the site has none."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = {
    "SECURITY.md": "security.md",
    "deploy/README.md": "deploy.md",
    "deploy/runbooks/A.md": "runbooks/A.md",
}


@pytest.fixture(scope="module")
def repository() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_repository", ROOT / "docs" / "repository.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "text", "in_site"),
    [
        ("deploy/README.md", "see [it](../SECURITY.md), and", "see [it](security.md), and"),
        ("deploy/README.md", "[docs/fleet.md](../docs/fleet.md)", "[docs/fleet.md](fleet.md)"),
        ("deploy/README.md", "[b](../SECURITY.md#in-short)", "[b](security.md#in-short)"),
        ("deploy/runbooks/A.md", "[a](../README.md)", "[a](../deploy.md)"),
        ("deploy/runbooks/A.md", "[s](../../SECURITY.md)", "[s](../security.md)"),
        ("SECURITY.md", "([checked](tests/e2e/README.md))", "(checked (`tests/e2e/README.md`))"),
        ("SECURITY.md", "[config/llmtap.toml](config/llmtap.toml)", "`config/llmtap.toml`"),
        ("SECURITY.md", "[the RFC](https://www.rfc-editor.org/rfc/rfc9110)", None),
        ("SECURITY.md", "[below](#here) and `rate(x[5m])`", None),
        ("SECURITY.md", "```sh\n[a](nowhere.md)\n```\n", None),
    ],
)  # fmt: skip
def test_links_lead_on(repository: ModuleType, source: str, text: str, in_site: str | None) -> None:
    assert repository.relinked(text, source, PAGES) == (text if in_site is None else in_site)


def test_a_link_to_nothing_ends_the_build(repository: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"SECURITY.md: a link to nowhere.md"):
        repository.relinked("```sh\n```\n[a](nowhere.md)", "SECURITY.md", PAGES)


def test_every_runbook_is_a_page_by_the_name_of_its_alert(repository: ModuleType) -> None:
    pages = repository.sources()
    for file in (ROOT / "deploy" / "runbooks").glob("Llmtap*.md"):
        assert pages[f"deploy/runbooks/{file.name}"] == f"runbooks/{file.name}"
    assert len(pages) > 15
    for source, page in pages.items():
        assert repository.relinked((ROOT / source).read_text(), source, pages), page
    text = (ROOT / "mkdocs.yml").read_text()
    known = yaml.safe_load(text)
    left_out = known["not_in_nav"].split()
    assert left_out == ["/runbooks/Llmtap*.md"]
    for page in pages.values():
        assert page.startswith("runbooks/Llmtap") or re.search(rf": {re.escape(page)}$", text, re.MULTILINE)
