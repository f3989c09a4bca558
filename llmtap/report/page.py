"""A report as one file that asks nobody for anything: plotly is in it, and its policy forbids it to load.

What a page is given as HTML is escaped already; texts for plotly are, too, since it reads tags in them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

from llmtap.errors import ConfigError

__all__ = ["contents_html", "page_html", "script_json", "table_html"]


def page_html(
    title: str,
    *,
    summary: str,
    settings: str,
    contents: str,
    sections: Iterable[str],
    plots: Mapping[str, Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    symbols: str = "",
    controls: str = "",
    style: str = "",
    script: str = "",
) -> str:
    """The page. Raises ConfigError where plotly is not installed.

    Args:
        title: text; the rest is HTML.
        plots: what plotly draws, by the id of its element; a trace's `meta.line` is its place in `lines`.
        lines: with their `colour`, and `of`, by which a choice of them is made.
        style, script: files of this room that a page has beside those that all have; of styles several, apart
            by spaces.
    """
    return Template(_part("curves.html")).substitute(
        title=escape(title),
        style=_part("curves.css") + "".join(map(_part, style.split())),
        summary=summary,
        settings=settings,
        contents=contents,
        controls=controls,
        sections="\n".join(sections),
        symbols=symbols,
        plotly=_plotly(),
        figures=script_json({"lines": lines, "plots": plots}),
        script=_part("curves.js") + (_part(script) if script else ""),
    )


def contents_html(headings: Mapping[str, str]) -> str:
    """Links to sections, by id."""
    return "".join(f'<li><a href="#{key}">{escape(heading)}</a></li>' for key, heading in headings.items())


def table_html(caption: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of texts; a row has a head and cells."""
    return "".join(_table_parts(caption, heads, rows))


def script_json(value: object) -> str:
    """For inside a script element: no `<` that could end it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _table_parts(
    caption: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]
) -> Iterator[str]:
    yield f"<table><caption>{escape(caption)}</caption><thead><tr>"
    yield from (f"<th scope=col>{escape(head)}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for label, cells in rows:
        yield f"<tr><th scope=row>{escape(label)}</th>"
        yield from (f"<td>{escape(cell)}</td>" for cell in cells)
        yield "</tr>"
    yield "</tbody></table>"


def _part(name: str) -> str:
    return files("llmtap.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("HTML", "plotly is not installed", "pip install 'llmtap[report]'") from None
    script: str = get_plotlyjs()
    return script
