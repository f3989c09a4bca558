"""Energy and memory of windows, by samples whose integral is known."""

from collections.abc import Sequence

from llmtap.bench.exo.result import Power, total_of
from llmtap.load.monitor.timeseries import Columns, MonitorSeries

S = 1_000_000_000


def sampled(**series: Sequence[float | None]) -> Columns:
    """A sample each second from 10 s on."""
    columns = Columns({name: MonitorSeries("any") for name in series})
    for i, row in enumerate(zip(*series.values(), strict=True)):
        columns.add((10 + i) * S, 0, dict(zip(series, row, strict=True)))
    return columns


def test_energy_is_that_of_the_window() -> None:
    columns = sampled(gpu0_power=[100.0] * 6, gpu1_power=[0.0, 100.0, 200.0, 300.0, 400.0, 500.0])
    found = Power(columns, {}).energy(11 * S, 14 * S)
    # 100 W for 3 s, and a line from 100 W to 400 W.
    assert found is not None
    assert (found.joules, found.known_ns, found.missing_ns) == (300.0 + 750.0, 3 * S, 0)


def test_all_windows_together() -> None:
    power = Power(sampled(gpu0_power=[100.0, 100.0, 200.0, 200.0]), {})
    windows = [power.energy(10 * S, 11 * S), None, power.energy(12 * S, 13 * S)]
    found = total_of(windows)
    assert found == {"joules": 300.0, "inference_seconds": 2.0, "average_power_w": 150.0}
    assert total_of([None]) is None


def test_nodes_power_has_that_of_their_gpus_in_it() -> None:
    local, node = sampled(gpu0_power=[100.0] * 3), sampled(power=[250.0] * 3)
    found = Power(local, {"n1": node, "n2": node}).energy(10 * S, 12 * S)
    assert found is not None and found.joules == 1_000.0


def test_nobody_tells_the_power() -> None:
    assert Power(sampled(host_cpu=[0.5]), {}).energy(10 * S, 11 * S) is None
    assert Power(None, {}).energy(10 * S, 11 * S) is None
    untold = sampled(gpu0_power=[100.0] * 2, gpu1_power=[None] * 2)
    assert Power(untold, {}).energy(100 * S, 101 * S) is None, "no sample is near"


def test_peak_memory_is_the_most_of_all_gpus_at_one_moment() -> None:
    columns = sampled(gpu0_memory=[5, 1, 2, 9, 99], gpu1_memory=[5, 3, 1, 1, 99], server_memory=[500] * 5)
    power = Power(columns, {})
    # From the last sample before to the first after: 11, 12 and 13 s.
    assert power.peak_memory(11 * S + 1, 12 * S + 1) == (10, "this host's GPUs")
    assert Power(sampled(server_memory=[7, 8, 6]), {}).peak_memory(10 * S, 12 * S) == (
        8,
        "the server's processes",
    )
    assert Power(None, {}).peak_memory(0, 1) is None
