"""4.7: clocks, and the network between the load generator and the SUT."""

import re
from typing import Final

from llmtap.bench.compliance.evidence import Step, at, boundary, over, seconds, text
from llmtap.bench.compliance.requirement import (
    ComplianceVerdict,
    Report,
    Requirement,
    cannot_tell,
    met,
    not_applicable,
    not_met,
    row,
)
from llmtap.units import NS_PER_S, parse_duration_ns

__all__ = ["ROWS"]

NTP_MAX_S: Final = 0.010
PTP_BELOW_S: Final = 0.001
NOT_PLACED: Final = "where the load generator stands is not declared (sut.clock.placement)"
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,}(Z|[+-]\d\d:\d\d)")


def _same_machine(report: Report) -> ComplianceVerdict:
    other = boundary(report, "model engine")
    if other is not None:
        return other
    placement = at(report, "sut.clock.placement")
    if placement is None:
        return cannot_tell(NOT_PLACED)
    return met(placement) if placement == "same machine" else not_met(f"the load generator is {placement}")


def _not_remote(report: Report) -> ComplianceVerdict | None:
    """None where the SUT is on another machine; else the verdict on what is demanded of that."""
    placement = at(report, "sut.clock.placement")
    if placement is None:
        return cannot_tell(NOT_PLACED)
    return None if placement == "remote" else not_applicable("load generator and SUT share a machine")


def _accuracy_s(report: Report) -> float | None:
    """`2ms`, `< 2 ms`, `0.002`"""
    told = text(at(report, "sut.clock.accuracy")).strip("<~ ").replace(" ", "")
    try:
        return parse_duration_ns(told) / NS_PER_S
    except ValueError:
        return None


def _ntp(report: Report) -> ComplianceVerdict:
    other = _not_remote(report)
    if other is not None:
        return other
    method, accuracy_s = text(at(report, "sut.clock.synchronization")), _accuracy_s(report)
    if not method:
        return cannot_tell("how clocks are synchronised is not declared (sut.clock.synchronization)")
    if "ntp" not in method.lower() and "chrony" not in method.lower():
        return not_applicable(f"clocks are synchronised by {method}")
    if accuracy_s is None:
        return cannot_tell("how well NTP does is not declared as a time (sut.clock.accuracy)")
    evidence = f"{method}, accurate to {seconds(accuracy_s)}; 10 ms needed"
    return met(evidence) if accuracy_s <= NTP_MAX_S else not_met(evidence)


def _ptp(report: Report) -> ComplianceVerdict:
    other = _not_remote(report)
    if other is not None:
        return other
    method, accuracy_s = text(at(report, "sut.clock.synchronization")), _accuracy_s(report)
    if "ptp" in method.lower():
        return met(method)
    if accuracy_s is None or accuracy_s >= PTP_BELOW_S:
        return not_applicable("no accuracy below a millisecond is asked for")
    return not_met(f"accurate to {seconds(accuracy_s)} by {method or 'nothing that is declared'}, not by PTP")


def _stated(report: Report) -> ComplianceVerdict:
    other = _not_remote(report)
    if other is not None:
        return other
    method, accuracy = (text(at(report, f"sut.clock.{name}")) for name in ("synchronization", "accuracy"))
    if method and accuracy:
        return met(f"{method}, accurate to {accuracy}")
    return not_met("sut.clock lacks " + ("accuracy" if method else "synchronization"))


def _rtt(report: Report) -> ComplianceVerdict:
    other = boundary(report, "application gateway") or _not_remote(report)
    if other is not None:
        return other
    said = _says(report, "rtt", "round trip")
    return met(said) if said else not_met("no round trip time of the network is in the report")


def _subtracted(report: Report) -> ComplianceVerdict:
    said = _says(report, "subtracted")
    return met(said) if said else not_applicable("no latency is said to be adjusted")


def _says(report: Report, *words: str) -> str | None:
    """A note, a line of the configuration or a statement on the SUT with one of these words."""
    lines = [
        *(f"{label}: {said}" for label, said in (report.get("configuration") or {}).items()),
        *(report.get("notes") or ()),
        *(at(report, "sut.notes") or ()),
    ]
    return next((line for line in map(str, lines) if any(word in line.lower() for word in words)), None)


def _dated(report: Report) -> ComplianceVerdict:
    def judge(step: Step) -> ComplianceVerdict:
        start = at(step, "result.window.start")
        if not isinstance(start, str):
            return cannot_tell("no load has the time of its start")
        return met(start) if _DATE.fullmatch(start) else not_met(start)

    return over(report, judge)


ROWS: Final[tuple[Requirement, ...]] = (
    row(
        "4.7.1-1", "RECOMMENDED", "setup", "A model engine is tested on the load generator's machine.",
        _same_machine,
    ),
    row("4.7.2-1", "MUST", "setup", "Of two machines, NTP keeps the clocks within 10 ms.", _ntp),
    row("4.7.2-2", "SHOULD", "setup", "Of two machines, PTP is used where less than 1 ms is needed.", _ptp),
    row(
        "4.7.2-3", "MUST", "report", "Of two machines, how clocks are synchronised and how well.", _stated,
    ),
    row("4.7.3-1", "SHOULD", "tester", "The network's round trip to a gateway is reported by itself.", _rtt),
    row("4.7.3-2", "MAY", "tester", "The network's latency may be subtracted from TTFT.", _subtracted),
    row("4.7.3-3", "MUST", "report", "Latencies that were adjusted are said to be.", _subtracted),
    row("4.7.4-1", "MUST", "report", "Timestamps have milliseconds or better.", _dated),
    row(
        "4.7.4-2", "RECOMMENDED", "report", "Timestamps are ISO 8601, or Unix time, with milliseconds.",
        _dated,
    ),
)  # fmt: skip
