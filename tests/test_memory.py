import resource

import pytest

from llmtap.memory import resident_bytes


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError()])
def test_it_is_the_peak_where_the_system_does_not_say(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*_: object) -> None:
        raise error

    monkeypatch.setattr("builtins.open", no_file)
    assert resident_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
