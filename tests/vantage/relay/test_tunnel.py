"""A Tunnel between two streams whose every turn is the test's: ends that meet bytes on their way.

How it does between real sockets is in test_upgrade.py, and with TLS in tests/net/test_tls.py.
"""

from llmtap.exchange.outcome import Outcome
from llmtap.net.stream import Handler
from llmtap.vantage.relay.tunnel import Tunnel


class FakeStream:
    """A stream that takes all, or nothing while `full`; with `tls` it cannot end by halves."""

    handler: Handler

    def __init__(self, *, tls: bool = False) -> None:
        self.tls = tls
        self.full = False
        self.closed = False
        self.ended = False
        """The peer has been told that no more comes."""
        self.paused = False
        self.took: list[bytes] = []
        self._kept: list[bytes] = []

    @property
    def pending(self) -> int:
        return 0 if self.closed else sum(map(len, self._kept))

    def write(self, data: bytes) -> bool:
        assert not self.ended or self.closed, "written behind the end"
        if self.closed:
            raise ConnectionResetError("connection is closed")
        (self._kept if self.full else self.took).append(data)
        return not self.full

    def drain(self) -> None:
        """The peer reads on."""
        self.full = False
        self.took += self._kept
        self._kept.clear()
        self.handler.on_drained()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def shutdown_write(self) -> None:
        self.ended = True
        if self.tls:
            self.close()

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.close()

    def peer_left(self) -> bool:
        return False

    def look_again(self) -> None:
        """Nothing is overlooked here."""

    def is_alive(self) -> bool:
        return not self.closed

    def says(self, data: bytes) -> None:
        """The peer does."""
        self.handler.on_data(data, 1)

    def says_end(self) -> None:
        """The peer says no more."""
        self.handler.on_eof()

    def goes(self, error: OSError | None = None) -> None:
        """The connection is gone; with TLS in order, when there is no error and the end was said before."""
        self.closed = True
        self.handler.on_lost(error)


COMPLETE = [(Outcome.COMPLETE, None)]


def tunnel_of(client: FakeStream, upstream: FakeStream) -> list[tuple[Outcome, str | None]]:
    """Make a tunnel; returns where it puts how it ended."""
    ends: list[tuple[Outcome, str | None]] = []
    Tunnel(client, upstream, lambda *_: None, lambda *how: ends.append(how))
    return ends


def test_it_is_over_when_both_ends_have_been_passed_and_not_when_they_have_come() -> None:
    client, upstream = FakeStream(), FakeStream()
    ends = tunnel_of(client, upstream)
    upstream.full = True
    client.says(b"last words")
    assert client.paused
    client.says_end()
    upstream.says_end()
    assert (upstream.ended, client.ended, ends) == (False, True, [])
    upstream.drain()
    assert (upstream.took, upstream.ended) == ([b"last words"], True)
    assert ends == COMPLETE
    assert client.closed
    assert upstream.closed


def test_a_tls_client_is_gone_before_its_last_words_are_taken() -> None:
    client, upstream = FakeStream(tls=True), FakeStream()
    ends = tunnel_of(client, upstream)
    upstream.full = True
    client.says(b"last words")
    client.says_end()
    client.goes()
    assert (upstream.ended, ends) == (False, [])
    upstream.drain()
    assert (upstream.took, upstream.ended, ends) == ([b"last words"], True, [])
    upstream.says_end()
    assert ends == COMPLETE


def test_a_tls_upstream_is_gone_before_its_last_words_are_taken() -> None:
    client, upstream = FakeStream(), FakeStream(tls=True)
    ends = tunnel_of(client, upstream)
    client.full = True
    upstream.says(b"last words")
    upstream.says_end()
    upstream.goes()
    client.says(b"nobody hears this")
    client.says_end()
    assert (client.ended, ends) == (False, [])
    client.drain()
    assert (client.took, client.ended) == ([b"last words"], True)
    assert ends == COMPLETE


def test_a_tls_upstream_that_goes_in_order_waits_for_the_clients_end() -> None:
    """Closing on a client that speaks would reset it, and cost it what it has not read yet."""
    client, upstream = FakeStream(), FakeStream(tls=True)
    ends = tunnel_of(client, upstream)
    upstream.says_end()
    upstream.goes()
    client.says(b"nobody hears this")
    assert (client.ended, client.closed, ends) == (True, False, [])
    client.says_end()
    assert ends == COMPLETE


def test_who_waited_for_a_tls_side_to_take_more_is_heard_when_it_has_gone() -> None:
    for client_tls in (False, True):
        client, upstream = FakeStream(tls=client_tls), FakeStream(tls=not client_tls)
        ends = tunnel_of(client, upstream)
        tls, plain = (client, upstream) if client_tls else (upstream, client)
        tls.full = True
        plain.says(b"too much")
        assert plain.paused
        tls.says_end()
        tls.goes()
        assert not plain.paused
        plain.says_end()
        assert ends == COMPLETE


def test_a_side_that_had_ended_before_a_tls_side_went_need_not_be_heard_again() -> None:
    client, upstream = FakeStream(), FakeStream(tls=True)
    ends = tunnel_of(client, upstream)
    upstream.full = True
    client.says(b"too much")
    client.says_end()
    upstream.says_end()
    assert ends == []
    upstream.goes()
    assert ends == COMPLETE


def test_a_client_that_goes_with_an_error_broke_it_even_behind_its_end() -> None:
    client, upstream = FakeStream(tls=True), FakeStream()
    ends = tunnel_of(client, upstream)
    client.says_end()
    client.goes(TimeoutError("it took nothing any more"))
    assert ends == [(Outcome.CLIENT_CANCELLED, "the client broke the tunnel (TimeoutError)")]
    assert upstream.closed


def test_what_an_upstream_said_before_it_broke_is_the_clients() -> None:
    for tls in (False, True):
        client, upstream = FakeStream(tls=tls), FakeStream()
        ends = tunnel_of(client, upstream)
        client.full = True
        upstream.says(b"last words")
        upstream.goes(ConnectionResetError("reset"))
        client.says(b"nobody hears this")
        client.says_end()
        assert (client.ended, ends) == (False, [])
        client.drain()
        assert (client.took, client.ended) == ([b"last words"], True)
        assert ends == [(Outcome.UPSTREAM_RESET, "the upstream broke the tunnel (ConnectionResetError)")]


def test_a_client_that_leaves_while_a_broken_upstreams_words_wait_for_it() -> None:
    client, upstream = FakeStream(), FakeStream()
    ends = tunnel_of(client, upstream)
    client.full = True
    upstream.says(b"last words")
    upstream.goes(ConnectionResetError("reset"))
    client.goes(ConnectionResetError("reset"))
    assert [outcome for outcome, _ in ends] == [Outcome.UPSTREAM_RESET], "the first break counts"
