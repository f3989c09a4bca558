"""Every link of the repository's pages leads to a file, and to the right page of the site."""

import re

import pytest
import yaml

from tests.docs.documents import ROOT, hook, pages

repository = hook("repository")
PAGES = {
    "SECURITY.md": "security.md",
    "deploy/README.md": "deploy.md",
    "deploy/runbooks/A.md": "runbooks/A.md",
}


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
        (
            "SECURITY.md",
            "```sh\n[a](no.md)\n```\n[b](deploy/README.md)",
            "```sh\n[a](no.md)\n```\n[b](deploy.md)",
        ),
        ("docs/wire.md", "[in two\nlines](../config)", "in two\nlines (`config`)"),
        ("docs/howto/look.md", "[a](../reference/README.md#admin-api)", "[a](../reference/api.md)"),
        ("docs/overhead.md", "[run](data/relay-2026-11-22.json)", None),
    ],
)
def test_links_lead_on(source: str, text: str, in_site: str | None) -> None:
    assert repository.relinked(text, source, PAGES) == (text if in_site is None else in_site)


def test_every_link_leads_to_a_file_of_the_repository() -> None:
    sources = repository.sources()
    places = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *sources)]
    for page in [*pages(), *places, *ROOT.glob("benchmarks/*.md"), *ROOT.glob("benchmarks/*/*.md")]:
        assert repository.relinked(page.read_text(), str(page.relative_to(ROOT)), sources)


def test_every_runbook_is_a_page_by_the_name_of_its_alert() -> None:
    sources = repository.sources()
    for file in (ROOT / "deploy" / "runbooks").glob("Llmtap*.md"):
        assert sources[f"deploy/runbooks/{file.name}"] == f"runbooks/{file.name}"
    text = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(text)["not_in_nav"].split() == ["/runbooks/Llmtap*.md"]
    for page in sources.values():
        assert page.startswith("runbooks/Llmtap") or re.search(rf": {re.escape(page)}$", text, re.MULTILINE)
