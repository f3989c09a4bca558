"""What may grow, and what did: memory of the processes that lived to the end, open files before and after.

Memory is judged from the end of the warm-up on, by the last third's median less the first's. Open files
depend on how many connections there are, so they are compared at rest: before the load, and when its
clients have left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from growth import Growth, growth
from watching import Look

ROLES = ("supervisor", "relay", "meter")
SETTLE_S = 10.0
"""Of a process that began within the judged time: its own start."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a process of each role may grow by, MiB, and how many files more it may have at rest."""

    mib: Mapping[str, float]
    files: int


@dataclass(slots=True)
class Verdict:
    """By role: `rss` and `pss` in MiB, `files` under load; and open files at rest, before and after."""

    growths: dict[str, dict[str, Growth]] = field(default_factory=dict)
    bounds_mib: dict[str, float] = field(default_factory=dict)
    rest: dict[str, tuple[int, int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "by_role": {
                role: {name: one.to_dict() for name, one in found.items()}
                for role, found in self.growths.items()
            },
            "bounds_mib": self.bounds_mib,
            "files_at_rest": {role: list(counts) for role, counts in self.rest.items()},
            "wrong": self.wrong,
        }


def judged(
    looks: Sequence[Look],
    from_s: float,
    to_s: float,
    before: Mapping[str, int],
    after: Mapping[str, int],
    bounds: Bounds,
) -> Verdict:
    """The verdict over the looks of `from_s` to `to_s`, of the last process of each role."""
    out = Verdict(bounds_mib=dict(bounds.mib))
    for role in ROLES:
        lived = _last_life([one for one in looks if one.role == role], from_s, to_s)
        figures = {
            "rss": [(one.t_s, one.rss / 1024) for one in lived],
            "pss": [(one.t_s, one.pss / 1024) for one in lived if one.pss is not None],
            "files": [(one.t_s, float(one.files)) for one in lived],
        }
        found = {}
        for name, series in figures.items():
            if series and (told := growth(*zip(*series, strict=True))) is not None:
                found[name] = told
        out.growths[role] = found
        if "rss" not in found:
            out.wrong.append(f"{role}: no process lived long enough to be judged")
        elif found["rss"].grown > bounds.mib[role]:
            out.wrong.append(
                f"{role}: memory grew by {found['rss'].grown:.1f} MiB, more than {bounds.mib[role]:g}"
            )
        out.rest[role] = (before.get(role, 0), after.get(role, 0))
        if out.rest[role][1] > out.rest[role][0] + bounds.files:
            first, last = out.rest[role]
            out.wrong.append(f"{role}: {last} open files at rest, {first} before")
    return out


def _last_life(looks: Sequence[Look], from_s: float, to_s: float) -> list[Look]:
    """Of the process that was looked at last: what was seen of it in that time, without its own start."""
    if not looks:
        return []
    pid = looks[-1].pid
    mine = [one for one in looks if one.pid == pid]
    begin_s = mine[0].t_s
    since_s = from_s if begin_s <= from_s - SETTLE_S else max(from_s, begin_s + SETTLE_S)
    return [one for one in mine if since_s <= one.t_s <= to_s]
