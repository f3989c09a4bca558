from array import array

from tests.support.workloads.batch_runs import workload


def test_rows_can_be_picked_in_any_order() -> None:
    requests = workload([(0, 1, 2), (1, 3, 4), (2, 5, 6)])
    requests.predicted[:] = array("q", [2, 4, 7])
    requests.blocks = [(), (8,), (8, 9)]
    taken = requests.select_rows([2, 0])
    assert taken.blocks == [(8, 9), ()]
    assert (len(taken), list(taken.arrival_ns)) == (2, [2_000_000_000, 0])
    assert (list(taken.input), list(taken.output), list(taken.predicted)) == ([5, 1], [6, 2], [7, 2])
