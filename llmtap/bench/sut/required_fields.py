"""Which declarations about a SUT the draft demands, beside what is known of it.

The demands themselves are asked: a declaration is demanded where a MUST that is met with it is not met, or
cannot be told, without it. So what depends on another declaration (how clocks are synchronised, of a remote
SUT) follows that.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from llmtap.bench.compliance.matrix import COMPARISON
from llmtap.bench.compliance.requirement import MUSTS, Report, Requirement
from llmtap.bench.compliance.requirements import REQUIREMENTS
from llmtap.bench.sut.sut import Sut

__all__ = ["demanded"]

SUT: Final = "sut."


def demanded(known: Mapping[str, Any], examples: Mapping[str, Any], url: str) -> dict[str, list[Requirement]]:
    """By key (`sut.tokenizer.special`) that is not known: the MUSTs that bind it. Keys that none binds are
    left out.

    Args:
        known, examples: values by key; others than those of the SUT count nothing. What is not known is taken
            to be as in the example.
    """
    whole = {key: value for key, value in {**examples, **known}.items() if key.startswith(SUT)}
    musts = [one for one in REQUIREMENTS if one.level in MUSTS and one.subject != COMPARISON]
    met = _met(musts, whole, url)
    found = {}
    for key in whole:
        if key in known:
            continue
        rest = {name: value for name, value in whole.items() if name != key}
        lost = [one for one in met if one.check(_report(rest, url)).status in ("not met", "cannot tell")]
        if lost:
            found[key] = lost
    return found


def _met(musts: Iterable[Requirement], values: Mapping[str, Any], url: str) -> list[Requirement]:
    report = _report(values, url)
    return [one for one in musts if one.check(report).status == "met"]


def _report(values: Mapping[str, Any], url: str) -> Report:
    """A report that has nothing but these declarations."""
    sut: dict[str, Any] = {}
    for key, value in values.items():
        *tables, name = key.removeprefix(SUT).split(".")
        at = sut
        for table in tables:
            at = at.setdefault(table, {})
        at[name] = value
    return {"sut": msgspec.to_builtins(msgspec.convert(sut, Sut)), "target": {"url": url}}
