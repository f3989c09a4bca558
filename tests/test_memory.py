import resource
from pathlib import Path

import pytest

from llmtap.memory import resident_bytes


def test_it_is_what_the_kernel_says() -> None:
    """proc_pid_status(5): VmRSS and the counts of statm are kept alike, but not updated at once."""
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmRSS:")]
    said = int(line.split()[1]) * 1024
    assert resident_bytes() == pytest.approx(said, rel=0.1)


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError()])
def test_it_is_the_peak_where_the_system_does_not_say(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*_: object) -> None:
        raise error

    monkeypatch.setattr("builtins.open", no_file)
    assert resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
