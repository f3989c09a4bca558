from llmtap.meter.relays import GONE_NS, RELAYS_MAX, STATUS_FRESH_NS, RelayBook
from llmtap.tap.frames import Hello
from tests.support.relay_status import relay_status

S = 1_000_000_000


def hello(name: str = "r0") -> Hello:
    return Hello(relay=name, pid=7, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)


def test_ready_means_a_relay_that_spoke_lately() -> None:
    book = RelayBook()
    assert not book.ready(0)
    epoch = book.join(hello())
    assert not book.ready(0)
    book.say("r0", relay_status(), 10)
    assert book.ready(10 + STATUS_FRESH_NS)
    assert not book.ready(11 + STATUS_FRESH_NS)
    book.leave("r0", epoch, 0, 11)
    assert not book.ready(11)


def test_exchanges_of_a_relay_that_stays_away_are_lost() -> None:
    book = RelayBook()
    epoch = book.join(hello())
    book.leave("r0", epoch, 3, 10)
    assert book.states(10 + GONE_NS)[0].lost == 0
    assert book.states(11 + GONE_NS)[0].lost == 3


def test_a_relay_that_comes_back_has_counted_by_itself() -> None:
    book = RelayBook()
    book.say("r0", relay_status(), 0)
    epoch = book.join(hello())
    book.say("r0", relay_status(opened=5), 0)
    book.leave("r0", epoch, 3, 10)
    book.join(hello())
    (state,) = book.states(100 * S)
    assert (state.lost, state.connected) == (0, True)
    assert state.status is not None
    assert state.status.opened == 5


def test_the_end_of_an_older_connection_does_not_count() -> None:
    book = RelayBook()
    old = book.join(hello())
    book.join(hello())
    book.leave("r0", old, 3, 10)
    assert book.states(100 * S)[0].connected


def test_relays_that_left_are_forgotten_from_the_oldest() -> None:
    book = RelayBook()
    book.join(hello("stays"))
    for i in range(RELAYS_MAX + 5):
        book.leave(f"r{i}", book.join(hello(f"r{i}")), 0, i)
    names = [state.name for state in book.states(0)]
    assert len(names) == RELAYS_MAX
    assert names[0] == "stays"
    assert names[-1] == f"r{RELAYS_MAX + 4}"


def test_as_json_a_relay_is_its_last_status() -> None:
    book = RelayBook()
    book.join(hello())
    assert book.to_dict(5) == {
        "r0": {"connected": True, "pid": 7, "clock": "mono", "status_age": None, "lost": 0}
    }  # fmt: skip
    book.say("r0", relay_status(opened=9, measured=7, dropped={"full": 2}, lag_ns_max=2_000_000), 1 * S)
    about = book.to_dict(3 * S)["r0"]
    assert isinstance(about, dict)
    assert (about["opened"], about["measured"], about["dropped"], about["unsettled"]) == (
        9,
        7,
        {"full": 2},
        0,
    )
    assert (about["status_age"], about["lag_max"]) == (2.0, 0.002)
