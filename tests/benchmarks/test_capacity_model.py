"""The capacity model is right by hand, and its published inputs stand where it says they do."""

import json
from pathlib import Path

import pytest

from benchmarks.capacity_model import PUBLISHED, Figure, Inputs, Need, Scenario, measured, needs

HOUSE = Path(__file__).parents[2]
HERE = "a test"


def inputs(**given: tuple[float, float, float]) -> Inputs:
    usual: dict[str, tuple[float, float, float]] = {
        "relay_us": (40, 40, 40),
        "meter_us": (15, 15, 15),
        "relay_kib": (3, 3, 3),
        "meter_kib": (7, 7, 7),
        "proxy_mib": (128, 128, 128),
        "relay_mib": (32, 32, 32),
        "event_bytes": (178, 178, 178),
        "series": (400, 400, 400),
    }
    return Inputs(**{name: Figure(*ends, HERE, HERE) for name, ends in (usual | given).items()})


def by_name(found: list[Need]) -> dict[str, Need]:
    return {one.what: one for one in found}


def test_a_worked_example() -> None:
    """100,000 streams of 10 events/s: a million events/s, at 40 us 40 cores, at half busy 80 workers."""
    found = by_name(needs(Scenario(100_000, 10, 0.5, 5), inputs(), streams_max=10_000))
    assert {what: one.mid for what, one in found.items()} == {
        "events/s": 1_000_000,
        "relay cores at 100 % load": 40,
        "meter cores at 100 % load": 15,
        "workers": 80,
        "workers per meter": 2,
        "proxies, each with one meter": 40,
        "cores": 110,
        "memory, GiB": pytest.approx((100_000 * 10 + (40 * 128 + 40 * 32) * 1024) / 1024**2),
        "open files": 200_000,
        "source addresses": 4,  # of 28,232 ports
        "network, each direction, Gbit/s": 2.0,  # 250 bytes a time
        "series to scrape": 40 * 5 * 400,
        "series after recording rules": 2_000,
    }
    assert all(one.low == one.mid == one.high for one in found.values())


def test_silent_streams_are_bound_by_the_limit_of_a_worker() -> None:
    found = by_name(needs(Scenario(100_000, 0, 0.5, 5), inputs(), streams_max=10_000))
    assert found["workers"].mid == 10
    assert found["cores"].mid == 0


def test_the_interval_holds_the_middle_and_both_ends() -> None:
    found = by_name(
        needs(Scenario(), inputs(relay_us=(30, 40, 50), meter_us=(10, 15, 20)), streams_max=10_000)
    )
    assert all(one.low <= one.mid <= one.high for one in found.values())
    assert (found["relay cores at 100 % load"].low, found["relay cores at 100 % load"].high) == (600, 1_000)
    # 3 workers per meter at best, 2 in the middle and at worst.
    assert (found["workers per meter"].low, found["workers per meter"].high) == (2, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("relay_us", "39.8 (33.4-48.0)"),
        ("meter_us", "15.0 (11.4-17.2)"),
        ("relay_kib", "2.7 (2.6-2.8)"),
        ("meter_kib", "9.8 (9.7-9.8)"),
        ("proxy_mib", "125.4"),
        ("relay_mib", "27.9"),
        ("event_bytes", "events of about 250 bytes"),
        ("series", "832,000"),
    ],
)
def test_a_published_input_stands_in_its_source(name: str, words: str) -> None:
    figure: Figure = getattr(PUBLISHED, name)
    places = [HOUSE / figure.source, HOUSE / "benchmarks/relay/HISTORY.md"]
    # What was measured later takes its place there, and the older goes to the history.
    assert any(words in " ".join(place.read_text().split()) for place in places)
    assert figure.low <= figure.mid <= figure.high


def test_newer_results_take_the_place_of_what_is_published(tmp_path: Path) -> None:
    assert measured(tmp_path) == PUBLISHED

    def put(name: str, date: str, **more: object) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"about": {"date": date}, **more}))

    def row(scenario: str, target: str, metric: str, value: float) -> dict[str, object]:
        return {"number": 0, "scenario": scenario, "sample": {"target": target, "metrics": {metric: value}}}

    relay = "relay/results/20260102-000000.json"
    rounds = [row("paced", "llmtap: relay alone", "cpu_us_per_event", value) for value in (33, 31, 32)]
    rounds += [row("idle", "llmtap", "idle_mb", 100), row("idle", "nginx", "idle_mb", 1)]
    put("relay/results/20260101-000000.json", "2026-01-01")  # the older one is not even read
    put(relay, "2026-01-02", rounds=rounds)
    found = measured(tmp_path)
    assert found.relay_us == Figure(31, 32, 33, f"benchmarks/{relay}", "2026-01-02")
    assert found.proxy_mib == Figure(100, 100, 100, f"benchmarks/{relay}", "2026-01-02")
    assert found.meter_us == PUBLISHED.meter_us

    spread = {"median": 20, "min": 19, "max": 21}
    put(
        "scaling/results/1.json",
        "2026-01-03",
        figures={"two": {"relay_us_per_event": spread, "meter_us_per_event": spread}},
        live={"relay_kib": 4.0, "meter_kib": 9.0, "events": 60.0},
    )
    found = measured(tmp_path)
    figures = (found.relay_us.mid, found.meter_us.high, found.relay_kib.mid, found.meter_kib.mid)
    assert figures == (20, 21, 4, 9)
