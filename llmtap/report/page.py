"""Render a document as one HTML file that loads nothing: plotly is in it, and its policy forbids requests.

`page_html` takes a `ReportDocument` and fills the template `page.html`; replay, benchmark and sweep reports
call it. The template escapes every text; texts for plotly are escaped before, since it reads tags in them.
"""

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final

import msgspec
from jinja2 import Environment, PackageLoader, Template
from markupsafe import Markup

from llmtap.report.document import ReportDocument

COLOURS: Final = 7
"""Number of colours in the style sheet, --c0 and on."""
_DASH_ARRAYS: Final = {
    "solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4",
    "longdashdot": "11 3 2 3",
}  # fmt: skip
"""Plotly's dashes in SVG."""
_SHAPES: Final = {
    "circle": Markup('<circle cx="20" cy="7" r="4.5"/>'),
    "square": Markup('<path d="M16 3h8v8h-8z"/>'),
    "diamond": Markup('<path d="M20 1.5 25.5 7 20 12.5 14.5 7z"/>'),
    "triangle-up": Markup('<path d="M20 1.5 25.5 11.5h-11z"/>'),
    "cross": Markup('<path d="M18 2h4v3h3v4h-3v3h-4v-3h-3v-4h3z"/>'),
    "x": Markup('<path d="m17 2 3 3 3-3 2.5 2.5L22.5 7.5l3 3L23 13l-3-3-3 3-2.5-2.5 3-3-3-3z"/>'),
}
"""Plotly's symbols in SVG."""


def page_html(document: ReportDocument, *assets: str) -> str:
    """Return the page; `assets` are style sheets and scripts of this folder beside those of every page."""
    from plotly.offline import get_plotlyjs  # imported late: it takes its time, and only pages need it

    plots = {
        f"{figure.key}-{i}": {"data": panel.data, "layout": panel.layout}
        for figure in document.figures()
        for i, panel in enumerate(figure.panels)
    }
    lines: list[Mapping[str, Any]] = [{"of": line.of, "colour": line.colour} for line in document.lines]
    lines = lines or [{"of": {}, "colour": i} for i in range(COLOURS)]
    return _template().render(
        doc=document,
        dashes=_DASH_ARRAYS,
        shapes=_SHAPES,
        style=_parts("curves.css", *(name for name in assets if name.endswith(".css"))),
        script=_parts("curves.js", *(name for name in assets if name.endswith(".js"))),
        figures=_json({"lines": lines, "plots": plots}),
        plotly=Markup(get_plotlyjs()),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("llmtap.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, finalize=_escaped,
    )  # fmt: skip
    environment.filters["json"] = lambda value: str(_json(value))
    return environment.get_template("page.html")


def _escaped(value: object) -> Markup:
    """Spell quotes as Python's standard library does."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def _parts(*names: str) -> Markup:
    return Markup(
        "".join(files("llmtap.report").joinpath(name).read_text(encoding="utf-8") for name in names)
    )


def _json(value: object) -> Markup:
    """For inside a script element: without a `<` that could end it."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))
