"""The shortest predicted answer is next. By hand, in ms."""

from array import array

from tests.support.iterating import Row, serve, workload


def test_who_waits_is_served_by_prediction_then_as_it_came() -> None:
    rows: list[Row] = [(0, 10, 1), (1, 10, 5), (2, 10, 2), (3, 10, 5), (4, 10, 1)]
    served = serve("shortest_predicted_first", rows, tokens_max="10", seqs_max="1")
    order = [prompts[0][0] for _, _, prompts, _ in served.iterations if prompts]
    assert order == [0, 4, 2, 1, 3]


def test_predictions_count_and_not_truth() -> None:
    requests = workload([(0, 10, 1), (1, 10, 1), (2, 10, 9)])
    requests.predicted = array("q", [0, 8, 2])
    served = serve("shortest_predicted_first", requests, tokens_max="10")
    assert [prompts[0][0] for _, _, prompts, _ in served.iterations if prompts] == [0, 2, 1]


def test_who_was_preempted_goes_before_shorter_ones() -> None:
    # As in test_roster: the second is thrown out at 108. A shorter one comes then, for which there is room.
    rows: list[Row] = [(0, 4, 9), (0, 4, 11), (109, 4, 1)]
    served = serve("shortest_predicted_first", rows, kv_tokens="16", block="4")
    assert [prompts for _, _, prompts, _ in served.iterations if prompts] == [
        [(0, 4), (1, 4)],
        [(1, 9), (2, 4)],
    ]
