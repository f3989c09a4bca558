from llmtap.export.families import HistogramFamily, counter, gauge, histogram


def test_histograms_are_cumulative_with_edges_in_their_unit() -> None:
    family = HistogramFamily("x_seconds", "help", (5_000_000, 2_000_000_000), labels=("who",))
    samples = histogram(family, [(("a",), [1, 2, 3], 4_500_000_000)]).samples
    assert [(s.name, s.labels, s.value) for s in samples] == [
        ("x_seconds_bucket", {"who": "a", "le": "0.005"}, 1.0),
        ("x_seconds_bucket", {"who": "a", "le": "2.0"}, 3.0),
        ("x_seconds_bucket", {"who": "a", "le": "+Inf"}, 6.0),
        ("x_seconds_count", {"who": "a"}, 6.0),
        ("x_seconds_sum", {"who": "a"}, 4.5),
    ]


def test_counters_and_gauges_carry_their_labels() -> None:
    (sample,) = counter("y", "help", ("a", "b"), [(("1", "2"), 7)]).samples
    assert (sample.name, sample.labels, sample.value) == ("y_total", {"a": "1", "b": "2"}, 7.0)
    (sample,) = gauge("z", "help", (), [((), 0.5)]).samples
    assert (sample.name, sample.labels, sample.value) == ("z", {}, 0.5)
