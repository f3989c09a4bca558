"""Invariant: opened = measured + dropped + unsettled, after any sequence of what can happen."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmtap.channel.channel import Ledger


def total(ledger: Ledger) -> int:
    return ledger.measured + sum(ledger.dropped.values()) + ledger.unsettled


class LedgerModel(RuleBasedStateMachine):
    """The ledger beside a model that keeps one word per exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.fate: dict[int, str] = {}
        self.waiting: dict[int, int] = {}
        self.batch_no = 0

    def of(self, fate: str) -> list[int]:
        return [seq for seq, f in self.fate.items() if f == fate]

    @rule(measured=st.booleans(), reason=st.sampled_from(["no_meter", "overflow"]))
    def open(self, measured: bool, reason: str) -> None:
        seq = self.ledger.open()
        assert seq == len(self.fate) + 1
        if measured:
            self.ledger.begin(seq)
            self.fate[seq] = "live"
        else:
            self.ledger.drop(seq, reason)
            self.fate[seq] = reason

    @precondition(lambda self: self.of("live"))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.of("live")))
        self.ledger.close(seq, self.batch_no + 1)
        self.fate[seq] = "closed"
        self.waiting[seq] = self.batch_no + 1

    @precondition(lambda self: self.of("live"))
    @rule(data=st.data())
    def overflow(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.of("live")))
        self.ledger.drop(seq, "overflow")
        self.fate[seq] = "overflow"

    @rule()
    def flush(self) -> None:
        self.batch_no += 1

    @rule(behind=st.integers(0, 3))
    def acknowledge(self, behind: int) -> None:
        upto = max(0, self.batch_no - behind)
        self.ledger.acknowledge(upto)
        for seq in [s for s, n in self.waiting.items() if n <= upto]:
            del self.waiting[seq]
            self.fate[seq] = "measured"

    @rule()
    def lose_meter(self) -> None:
        self.ledger.lose_meter()
        self.waiting.clear()
        for seq, fate in self.fate.items():
            if fate in ("live", "closed"):
                self.fate[seq] = "meter_lost"

    @invariant()
    def adds_up(self) -> None:
        ledger = self.ledger
        assert ledger.opened == total(ledger) == len(self.fate)
        assert ledger.measured == len(self.of("measured"))
        assert ledger.unsettled == len(self.of("live")) + len(self.of("closed"))
        assert ledger.live == set(self.of("live"))
        assert {
            k: n for k in ("no_meter", "overflow", "meter_lost") if (n := len(self.of(k)))
        } == ledger.dropped


TestLedger = LedgerModel.TestCase
