"""A report as one file that asks nobody for anything: plotly is in it, and its policy forbids it to load.

What a page is given as HTML is escaped already; texts for plotly are, too, since it reads tags in them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import zip_longest
from string import Template
from typing import Any, Final

import msgspec

from llmtap.report.terminal import is_words

__all__ = [
    "DASH_ARRAYS", "contents_html", "legend_html", "page_html", "script_json", "scrolled_html", "table_html",
    "terms_html",
]  # fmt: skip

DASH_ARRAYS: Final = {
    "solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4",
    "longdashdot": "11 3 2 3",
}  # fmt: skip
"""What plotly calls a dash, in SVG."""
_WORDS_FROM: Final = 40
"""Letters of a cell from which it is a sentence and no figure."""


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
    """The page.

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


def table_html(
    caption: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], *, breaks: bool = False
) -> str:
    """A table of texts; a row has a head and cells. With `breaks`, columns of sentences are of class `said`,
    which a style may break into lines."""
    return "".join(_table_parts(caption, heads, rows, breaks))


def scrolled_html(name: str, html: str) -> str:
    """Tables that may be wider than the page."""
    return f'<div class="scroll wide" tabindex=0 role=region aria-label="{escape(name)}, table">{html}</div>'


def terms_html(rows: Iterable[tuple[str, str]]) -> str:
    """Terms, and what is said of each; nothing where there are none."""
    cells = "".join(
        f"<tr><th scope=row>{escape(term)}</th><td>{escape(text)}</td></tr>" for term, text in rows
    )
    return f"<table class=terms><tbody>{cells}</tbody></table>" if cells else ""


def legend_html(keys: Iterable[tuple[str, int | None, str]], *, bars: bool = False) -> str:
    """Names, each behind its line as it is drawn: with a colour's number (None is none of them) and a dash;
    or behind a piece of its bars."""
    shown = "".join(f"<span>{_key(colour, dash, bars)}{escape(name)}</span>" for name, colour, dash in keys)
    return f"<div class=legend aria-hidden=true>{shown}</div>" if shown else ""


def script_json(value: object) -> str:
    """For inside a script element: no `<` that could end it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _key(colour: int | None, dash: str, bars: bool) -> str:
    paint = "var(--soft)" if colour is None else f"var(--c{colour})"
    dashes = f'stroke-width=2 stroke-dasharray="{DASH_ARRAYS[dash]}"'
    mark = f'<path d="M0 7h40" style="stroke:{paint}" {dashes} />'
    if bars:
        mark = f'<rect x=12 y=2 width=16 height=10 style="fill:{paint}" />'
    return f'<svg class=key width=40 height=14 viewBox="0 0 40 14" aria-hidden=true>{mark}</svg>'


def _table_parts(
    caption: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], breaks: bool
) -> Iterator[str]:
    lines = [(label, *cells) for label, cells in rows]
    columns = zip_longest(*lines, fillvalue="")
    kinds = [
        " class=said"
        if breaks and any(map(_is_sentence, column))
        else " class=words"
        if is_words(column)
        else ""
        for column in columns
    ]
    kinds += [""] * (len(heads) - len(kinds))
    yield f"<table><caption>{escape(caption)}</caption><thead><tr>"
    yield from (f"<th scope=col{kind}>{escape(head)}</th>" for head, kind in zip(heads, kinds, strict=False))
    yield "</tr></thead><tbody>"
    for label, *cells in lines:
        yield f"<tr><th scope=row{kinds[0]}>{escape(label)}</th>"
        yield from (f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(cells, kinds[1:], strict=False))
        yield "</tr>"
    yield "</tbody></table>"


def _is_sentence(cell: str) -> bool:
    return len(cell) >= _WORDS_FROM and " " in cell


def _part(name: str) -> str:
    return files("llmtap.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # takes its time, and only pages want it

    script: str = get_plotlyjs()
    return script
