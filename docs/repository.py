"""Pages that lie elsewhere in the repository, where they are read beside what they are about.

A hook of mkdocs (see mkdocs.yml). Each build takes them as they are then. Links between them, and to pages of
docs/, lead on within the site; a file that the site does not have is named in place of a link to it, and one
that there is none of ends the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

__all__ = ["on_files", "relinked", "sources"]

_ROOT: Final = Path(__file__).parents[1]
_LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
_FENCE: Final = re.compile(r"^ *(```|~~~)")


def sources() -> dict[str, str]:
    """Files of the repository, and the pages of the site that they become."""
    runbooks = sorted((_ROOT / "deploy" / "runbooks").glob("*.md"))
    return {
        "deploy/README.md": "deploy.md",
        "SECURITY.md": "security.md",
        **{f"deploy/runbooks/{one.name}": f"runbooks/{one.name}" for one in runbooks},
        "deploy/runbooks/README.md": "runbooks/index.md",
    }


def relinked(text: str, source: str, pages: dict[str, str]) -> str:
    """A page's text for the site.

    Args:
        text: as it lies in the repository at `source`.
        pages: what the site has from elsewhere, as `sources` gives it.

    Raises:
        FileNotFoundError: a link leads to no file.
    """

    def linked(found: re.Match[str]) -> str:
        target = found["target"]
        if re.match(r"[a-z]+:", target):
            return found[0]
        place = os.path.normpath(PurePosixPath(source).parent / target)
        if not (_ROOT / place).exists():
            raise FileNotFoundError(f"{source}: a link to {target}, which there is none of")
        page = place.removeprefix("docs/") if re.match(r"docs/.*\.md$", place) else pages.get(place)
        if page is None:
            return f"`{place}`" if found["text"] in (place, target) else f"{found['text']} (`{place}`)"
        here = PurePosixPath(pages[source]).parent
        return f"[{found['text']}]({os.path.relpath(page, here)}{found['anchor'] or ''})"

    lines, fenced = [], False
    for line in text.splitlines(keepends=True):
        fenced ^= _FENCE.match(line) is not None
        lines.append(line if fenced else _LINK.sub(linked, line))
    return "".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it has found its own files."""
    from mkdocs.structure.files import File

    pages = sources()
    for source, page in pages.items():
        text = (_ROOT / source).read_text()
        files.append(File.generated(config, page, content=relinked(text, source, pages)))
    return files
