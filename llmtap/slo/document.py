"""YAML for people: keys in our order, queries as they were written, comments before what they are about."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

import yaml

__all__ = ["commented", "to_yaml"]

_WIDTH: Final = 110


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Spells everything out: no anchors for what occurs twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(document: Any) -> str:
    """A document as YAML; texts of several lines are blocks."""
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH, default_flow_style=False
    )
    return text


def commented(lines: Iterable[str], indent: Sequence[int] = (0, 0)) -> str:
    """Sentences as comments, each wrapped; `indent`: of the first line of each, and of the others."""
    return "".join(
        textwrap.fill(
            line, _WIDTH, initial_indent="# " + " " * indent[0], subsequent_indent="# " + " " * indent[1]
        )
        + "\n"
        for line in lines
    )
