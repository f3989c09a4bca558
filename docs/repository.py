"""Hook of mkdocs that adds pages from outside docs/, and adapts links of the repository to the site.

A link to a file that is no page of the site becomes the name of the file. A link to a missing file ends the
build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT: Final = Path(__file__).parents[1]
_LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
_FENCE: Final = re.compile(r"^ *(```|~~~)")
_REFERENCE: Final = {
    "#commands": "reference/cli.md",
    "#options": "reference/options.md",
    "#admin-api": "reference/api.md",
}
"""Sections of docs/reference/README.md, and the generated page that replaces each one in the site."""


def sources() -> dict[str, str]:
    """Return the files outside docs/ that are pages of the site, with the names of their pages."""
    runbooks = sorted((_ROOT / "deploy" / "runbooks").glob("*.md"))
    return {
        "deploy/README.md": "deploy.md",
        "llmtap/metrics/DEFINITIONS.md": "definitions.md",
        "SECURITY.md": "security.md",
        **{f"deploy/runbooks/{one.name}": f"runbooks/{one.name}" for one in runbooks},
        "deploy/runbooks/README.md": "runbooks/index.md",
    }


def relinked(text: str, source: str, pages: dict[str, str]) -> str:
    """Return the text of the file `source` with its links as the site needs them.

    `pages` is as `sources` returns it. Raises FileNotFoundError if a link leads to no file of the repository.
    """

    def linked(found: re.Match[str]) -> str:
        target, anchor = found["target"], found["anchor"] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        place = os.path.normpath(PurePosixPath(source).parent / target)
        if not (_ROOT / place).exists():
            raise FileNotFoundError(f"{source}: the file of the link {target} does not exist")
        if place == "docs/reference/README.md":
            page, anchor = _REFERENCE[anchor], ""
        elif place.startswith("docs/"):
            page = place.removeprefix("docs/")
        elif place in pages:
            page = pages[place]
        else:
            return f"`{place}`" if found["text"] in (place, target) else f"{found['text']} (`{place}`)"
        here = PurePosixPath(pages.get(source, source.removeprefix("docs/"))).parent
        return f"[{found['text']}]({os.path.relpath(page, here)}{anchor})"

    # A link may go on in the next line, so the text between two fences is adapted as a whole.
    parts, fenced = [""], False
    for line in text.splitlines(keepends=True):
        if _FENCE.match(line):
            fenced = not fenced
            parts.append("")
        parts[-1] += line
    return "".join(part if number % 2 else _LINK.sub(linked, part) for number, part in enumerate(parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/. Called by mkdocs."""
    from mkdocs.structure.files import File

    pages = sources()
    for source, page in pages.items():
        text = (_ROOT / source).read_text()
        files.append(File.generated(config, page, content=relinked(text, source, pages)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Adapt the links of a page of docs/. Called by mkdocs for each page."""
    if page.file.generated_by is not None:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", sources())
