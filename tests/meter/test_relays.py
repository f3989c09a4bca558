"""Invariant of the reckoning: opened = measured + dropped + running; and the upstream's own metrics."""

import asyncio
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtap.channel import Ledger
from llmtap.channel.frames import Hello
from llmtap.meter.admin.views import upstream_values
from llmtap.meter.relays import (
    GONE_NS,
    RELAYS_MAX,
    STATUS_FRESH_NS,
    Reckoning,
    RelayAccount,
    RelayBook,
    UpstreamLoad,
)
from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.support.servers.peer import wait_until
from tests.support.servers.sim_engine import CHAT, ask_chat, engine
from tests.support.traffic.relay_status import relay_status

S = 1_000_000_000


def hello(name: str = "r0") -> Hello:
    return Hello(relay=name, pid=7, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)


def test_clients_connect_to_the_newest_relay_that_listens() -> None:
    book = RelayBook()
    assert book.listen_url() is None
    old, new, app = (replace(hello(name), listen=at) for name, at in (("r0", "a"), ("r1", "b"), ("app", "")))
    book.join(old)
    epoch = book.join(new)
    book.join(app)
    assert book.listen_url() == "b"
    book.leave("r1", epoch, 0, S)
    assert book.listen_url() == "a"


def test_a_meter_that_comes_later_counts_only_requests_skipped_since() -> None:
    book = RelayBook()
    book.join(replace(hello(), skipped=40))
    assert book.update("r0", relay_status(skipped={"GET": 41, "/tokenize": 2}), 10) == 3
    assert book.update("r0", relay_status(skipped={"GET": 41, "/tokenize": 2}), 20) == 0
    assert book.update("another", relay_status(skipped={"GET": 1}), 20) == 0


def test_ready_means_a_relay_that_spoke_lately() -> None:
    book = RelayBook()
    assert not book.has_ready_relay(0)
    epoch = book.join(hello())
    assert not book.has_ready_relay(0)
    book.update("r0", relay_status(), 10)
    assert book.has_ready_relay(10 + STATUS_FRESH_NS)
    assert not book.has_ready_relay(11 + STATUS_FRESH_NS)
    for up, ready in ((False, False), (True, True)):
        book.update("r0", relay_status(upstream_up=up), 10)
        assert book.has_ready_relay(10) == ready
    book.leave("r0", epoch, 0, 11)
    assert not book.has_ready_relay(11)


def test_a_relay_that_comes_back_has_counted_by_itself() -> None:
    book = RelayBook()
    book.update("r0", relay_status(), 0)
    epoch = book.join(hello())
    book.update("r0", relay_status(opened=5), 0)
    book.leave("r0", epoch, 3, 10)
    book.join(hello())
    (state,) = book.states(100 * S)
    assert state.connected
    assert state.status is not None
    assert (state.status.opened, state.status.lost) == (5, 0)


def test_what_a_relay_that_left_had_done_since_its_last_status_is_reckoned() -> None:
    book = RelayBook()
    epoch = book.join(hello())
    book.update("r0", relay_status(opened=5, measured=3, unsettled=2), 0)
    final = relay_status(opened=7, measured=6, unsettled=1)
    book.leave("r0", epoch, 1, 10, final)
    (state,) = book.states(11)
    assert state.status == final
    lost = book.to_dict(11 + GONE_NS)["r0"]
    assert isinstance(lost, dict)
    assert [lost[k] for k in ("opened", "measured", "unsettled", "lost")] == [7, 6, 0, 1], "each counted once"


STEP = st.sampled_from(["open", "open", "open", "refuse", "close", "close", "drop", "acknowledge", "status"])


@given(st.lists(STEP, max_size=80))
def test_the_reckoning_is_what_the_dead_relays_ledger_would_say(steps: list[str]) -> None:
    """A relay's ledger beside what its frames tell; then it dies, and the meter has read all that it sent."""
    ledger, reckoning = Ledger(), Reckoning()
    result = False
    seen = lost_unseen = batch = 0
    for step in ["status", *steps]:
        batch += 1
        running = sorted(ledger.live)
        match step:
            case "open":
                seen = seq = ledger.open()
                lost_unseen = 0
                ledger.begin(seq)
                reckoning.count_opened(seq)
            case "refuse":  # no frame tells of it, until a later number does
                ledger.drop(ledger.open(), "overflow")
                lost_unseen += 1
            case "close" if running:
                ledger.close(running[0], batch)
                reckoning.count_settled(dropped=False)
            case "drop" if running:
                ledger.drop(running[-1], "overflow")
                reckoning.count_settled(dropped=True)
            case "acknowledge":
                ledger.acknowledge(batch // 2)
            case "status":
                result, seen, lost_unseen = True, ledger.opened, 0
                reckoning.update(
                    relay_status(
                        opened=ledger.opened,
                        measured=ledger.measured,
                        dropped=dict(ledger.dropped),
                        unsettled=ledger.unsettled,
                    )
                )
    ledger.acknowledge(batch)
    final = reckoning.final_status()
    assert result
    assert final is not None
    assert reckoning.running == len(ledger.live)
    assert final.opened == seen == ledger.opened - lost_unseen
    assert final.measured == ledger.measured
    assert sum(final.dropped.values()) == sum(ledger.dropped.values()) - lost_unseen
    assert final.opened == final.measured + sum(final.dropped.values()) + reckoning.running


def test_what_another_meter_should_know_of_a_relay() -> None:
    book = RelayBook()
    silent, lost, away = book.join(hello("silent")), book.join(hello("lost")), book.join(hello("away"))
    for name in ("lost", "away"):
        book.update(name, relay_status(opened=9, measured=4, dropped={"overflow": 1}, unsettled=4), 0)
    book.leave("silent", silent, 2, 10)
    book.leave("lost", lost, 4, 10)
    accounts = {account.hello.relay: account for account in book.accounts()}
    assert set(accounts) == {"lost", "away"}, "of a relay that never spoke there is nothing to tell"
    assert accounts["lost"].status == relay_status(opened=9, measured=4, dropped={"overflow": 1}, lost=4)
    assert not accounts["lost"].connected
    assert accounts["away"].connected
    assert accounts["away"].status.unsettled == 4
    book.leave("away", away, 0, 20)


def test_a_relay_of_another_meter_is_shown_until_it_comes_here_or_that_meter_is_silent() -> None:
    book, now_ns = RelayBook(), 100 * S

    def account(measured: int, *, connected: bool = True) -> RelayAccount:
        return RelayAccount(hello(), relay_status(t_ns=now_ns, opened=3, measured=measured), connected)

    book.absorb([account(1)], now_ns)
    (state,) = book.states(now_ns)
    assert (state.connected, state.measured_elsewhere) == (True, True)
    assert not book.accounts(), "that comes from the other meter"
    assert not book.has_ready_relay(now_ns)
    (state,) = book.states(now_ns + 6 * S)
    assert not state.connected, "that meter was killed"
    book.absorb([account(3, connected=False)], now_ns)
    (state,) = book.states(now_ns)
    assert state.status is not None
    assert (state.connected, state.status.measured) == (False, 3)
    book.join(hello())
    book.absorb([account(2)], now_ns)
    (state,) = book.states(now_ns)
    assert state.status is not None
    assert (state.connected, state.measured_elsewhere, state.status.measured) == (True, False, 3), (
        "it has come to us"
    )


def test_relays_that_left_are_forgotten_from_the_oldest() -> None:
    book = RelayBook()
    book.join(hello("stays"))
    for i in range(RELAYS_MAX + 5):
        book.leave(f"r{i}", book.join(hello(f"r{i}")), 0, i)
    names = [state.name for state in book.states(0)]
    assert len(names) == RELAYS_MAX
    assert names[0] == "stays"
    assert names[-1] == f"r{RELAYS_MAX + 4}"


async def test_load_and_tokens_of_the_upstream_are_read_and_forgotten_when_it_is_gone() -> None:
    async with engine(SimOptions(ttft=Duration(0), itl=Duration(0), tokens=7)) as served:
        assert (await served.answer(CHAT, ask_chat()))[0] == 200
        load = UpstreamLoad(f"{served.url}/metrics")
        reading = asyncio.create_task(load.run())
        await wait_until(lambda: bool(load.values))
        values = upstream_values(load)
        assert values["upstream_output_tokens"] == 7
        assert values["upstream_running_requests"] == values["upstream_waiting_requests"] == 0
        assert load.to_dict()["problem"] is None
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    reading = asyncio.create_task(load.run())
    await wait_until(lambda: load.failures == 1)
    reading.cancel()
    assert load.to_dict() == {"values": {}, "failures": 1, "problem": load.problem}
    assert load.problem
    assert upstream_values(load) == {"upstream_scrape_failures": 1}
    assert upstream_values(None) == {}
