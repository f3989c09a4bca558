"""What is kept from one worker to two, by hand."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "scaling"))

import figures


def worker(cpu: int, us: float, events: float, connections: int = 100) -> figures.Worker:
    return figures.Worker(cpu, us * events / 1e6, events, connections)


def run(*workers: figures.Worker, meter_us: float = 15, whole: bool = True) -> figures.Run:
    events = round(sum(one.events for one in workers))
    return figures.Run(list(workers), meter_us * events / 1e6, events, events, 10, 80, 600, 0, 0, whole)


def test_each_worker_is_priced_by_the_single_one_of_its_cpu() -> None:
    """40 us alone on CPU 0, 50 on CPU 1; a pair that needs 44 and 55 keeps 1 / 1.1, however events fell."""
    single = [run(worker(0, 40, 1_000)), run(worker(1, 50, 1_000))]
    for first, second in ((1_000, 1_000), (1_500, 500)):
        two = run(worker(0, 44, first), worker(1, 55, second))
        assert figures.scaling(single, two) == pytest.approx(1 / 1.1)
    assert figures.scaling(single, run(worker(0, 40, 700), worker(1, 50, 300))) == pytest.approx(1)


def test_a_spread_is_told_in_deviations_of_coins() -> None:
    assert (figures.Spread(50, 50).z, figures.Spread(50, 50).share) == (0, 0.5)
    assert figures.Spread(60, 40).z == pytest.approx(2)  # 10 off 50, of a deviation of 5
    assert figures.Spread(0, 0).share == 0


def reported(us: float, **more: bool) -> dict[str, object]:
    one = {
        "one, first CPU": run(worker(0, 40, 1_000)),
        "one, second CPU": run(worker(1, 40, 1_000)),
        "two": run(worker(0, us, 1_000), worker(1, us, 1_000), **more),
    }
    return figures.report([one, one], {"events": 60.0, "relay_kib": 3.0}, {}, Console(file=io.StringIO()))


def test_less_than_the_goal_fails_and_so_does_a_damaged_stream() -> None:
    good = reported(42)
    assert good["ok"] and good["wrong"] == []
    assert good["kept"] == pytest.approx({"median": 40 / 42, "min": 40 / 42, "max": 40 / 42})
    # 40 us of a relay to 15 of the meter: 2.7 relays to a meter, 2.8 where they need 42.
    assert good["workers_per_meter"]["median"] == pytest.approx(40 / 15)  # type: ignore[index]
    bad = reported(50)
    assert not bad["ok"] and len(bad["wrong"]) == 1  # type: ignore[arg-type]
    assert not reported(40, whole=False)["ok"]
