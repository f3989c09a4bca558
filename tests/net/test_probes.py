"""What a probe of the loop can overlook, and what an exchange says of that."""

from llmtap.load import sender
from llmtap.record.observer import UNSEEN_NS
from llmtap.relay import relay


def test_no_stall_that_goes_unseen_is_longer_than_exchanges_allow_for() -> None:
    for room in (relay, sender):
        assert room.PROBE_S * 1e9 + room.PROBE_GRAIN_NS <= UNSEEN_NS
