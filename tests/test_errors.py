from llmtap.errors import ExitCode


def test_every_exit_code_is_a_number_with_a_meaning() -> None:
    assert {int(code) for code in ExitCode} == {0, 1, 2, 3, 4, 129, 130, 143}
    assert all(code.meaning for code in ExitCode)
    assert ExitCode(3) is ExitCode.MISSED


def test_a_failed_load_comes_before_a_missed_gate_and_that_before_an_invalid_figure() -> None:
    assert ExitCode.of_run() is ExitCode.OK
    assert ExitCode.of_run(not_valid=True) is ExitCode.NOT_VALID
    assert ExitCode.of_run(missed=True, not_valid=True) is ExitCode.MISSED
    assert ExitCode.of_run(failed=True, missed=True, not_valid=True) is ExitCode.FAILED
