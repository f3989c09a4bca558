from llmtap.export.prometheus.text import HistogramFamily, counter, gauge


def test_further_edges_fall_into_place_once() -> None:
    family = HistogramFamily("x_seconds", "help", (5, 20))
    assert family.with_edges([10, 20, 1]).edges == (1, 5, 10, 20)
    assert family.edges == (5, 20)


def test_counters_and_gauges_carry_their_labels() -> None:
    (sample,) = counter("y", "help", ("a", "b"), [(("1", "2"), 7)]).samples
    assert (sample.name, sample.labels, sample.value) == ("y_total", {"a": "1", "b": "2"}, 7.0)
    (sample,) = gauge("z", "help", (), [((), 0.5)]).samples
    assert (sample.name, sample.labels, sample.value) == ("z", {}, 0.5)
