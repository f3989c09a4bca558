"""What a probe of the loop can overlook, and what an exchange says of that."""

from llmtap.exchange.observer import UNSEEN_NS
from llmtap.load.sending import GRAIN_NS, PROBE_NS
from llmtap.vantage.relay.relay import PROBE_GRAIN_NS, PROBE_S


def test_no_stall_that_goes_unseen_is_longer_than_exchanges_allow_for() -> None:
    assert PROBE_S * 1e9 + PROBE_GRAIN_NS <= UNSEEN_NS
    assert PROBE_NS + GRAIN_NS <= UNSEEN_NS
