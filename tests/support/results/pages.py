"""A report's page taken apart: its words, headings, tables and plots; and its colours."""

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The page taken apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.captions: dict[str, str] = {}
        self.words = ""
        self._section = ""
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag in ("meta", "br", "input"):
            return
        self._open.append(tag)
        if tag == "section":
            self._section = given["id"] or ""
        if tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self.tables[self._section][-1].append("")
        if tag in ("h1", "h2", "h3"):
            self.headings.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            self.scripts[-1] += data
            return
        if "style" in self._open:
            return
        self.words += data
        if {"td", "th"} & set(self._open):
            self.tables[self._section][-1][-1] += data
        if self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.headings[-1] += data
        if "figcaption" in self._open:
            self.captions[self._section] = self.captions.get(self._section, "") + data

    @property
    def figures(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.scripts[0])
        return told

    def series(self, plot: str) -> dict[str, list[tuple[Any, Any]]]:
        """Points of each run's line, by name."""
        series = self.figures["plots"][plot]["series"]
        return {one["name"]: list(zip(one["x"], one["y"], strict=True)) for one in series if "line" in one}


def contrast(one: str, other: str) -> float:
    """Of two colours #rrggbb, from 1 to 21 (WCAG 2.2)."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
