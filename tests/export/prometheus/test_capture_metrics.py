"""The capture's own figures: an alert finds a sample while all is well, too."""

import pytest

from llmtap.export.prometheus.self_metrics import CaptureState, collect_capture


def _found(state: CaptureState) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for m in collect_capture(state) for s in m.samples}


@pytest.mark.parametrize(
    ("problem", "files_problem", "paused", "reasons"),
    [
        (None, None, 0, []),
        ("disk_full", None, 1, ["disk_full"]),
        (None, "the bucket is not there", 0, ["files"]),
        ("total_bytes", "the bucket is not there", 1, ["files", "total_bytes"]),
    ],
)
def test_paused_is_always_there_and_problems_are_by_reason(
    problem: str | None, files_problem: str | None, paused: int, reasons: list[str]
) -> None:
    found = _found(CaptureState(problem=problem, files_problem=files_problem))
    assert found["llmtap_capture_paused",] == paused
    problems = {key[1]: n for key, n in found.items() if key[0] == "llmtap_capture_problem"}
    assert problems == dict.fromkeys(reasons, 1)


def test_every_figure_is_shown_to_both_kinds_of_readers() -> None:
    state = CaptureState(
        to="s3://***@bucket/x", level="shape", exchanges=1, waiting=2, dropped={"memory": 3}, unshaped=4,
        problem="folder", files_problem="a sentence", bytes_written=5, files=6, files_waiting=7,
        files_deleted=8, spool_bytes=9, local_bytes=10, failures=11, recovered=12, damaged=13,
    )  # fmt: skip
    assert state.to_dict() == {name: getattr(state, name) for name in CaptureState.__slots__}
    assert sorted(_found(state).values()) == [1, 1, 1, *range(1, 14)]


def test_texts_say_what_is_counted() -> None:
    texts = {m.name: m.documentation for m in collect_capture(CaptureState())}
    assert texts["llmtap_capture_waiting_files"].startswith("Closed spools")
    assert "spools and local files" in texts["llmtap_capture_local_bytes"]
