"""The player itself: what it sends is what was recorded, and when it went out is noted."""

import pytest

from llmtap.protocol.http1 import ChunkedDecoder
from tests.support.servers.peer import Ending
from tests.support.servers.raw_client import RawClient
from tests.support.traffic.corpus import NAMES, Player, Recorded


@pytest.mark.parametrize("name", NAMES)
def test_the_pieces_of_a_recording_are_its_body(name: str) -> None:
    recorded = Recorded(name)
    body = recorded.wire.rpartition(b"HTTP/1.")[2].partition(b"\r\n\r\n")[2]
    if recorded.doc["response"]["transfer"] == "chunked":
        body = ChunkedDecoder().feed(body)
    assert body == recorded.body
    assert [p.due_ms for p in recorded.pieces] == sorted(p.due_ms for p in recorded.pieces)


async def test_a_recording_is_played_as_it_was_recorded() -> None:
    for name, ending in (
        ("sse_crlf", None),
        ("http10_close_delimited", Ending.FIN),
        ("truncated_mid_event", Ending.RST),
    ):
        recorded = Recorded(name)
        player = Player({name: recorded})
        client = await RawClient.connect(int(player.url.rpartition(":")[2]))
        await client.send(recorded.request(f"X-Request-Id: {name}"))
        if ending is None:
            assert await client.exactly(len(recorded.wire)) == recorded.wire
        else:
            assert await client.to_end() == (recorded.wire, ending)
        client.close()
        await player.stop()
        assert player.errors == []
        played = player.played[name]
        assert len(played.sent) == len(recorded.pieces)
        for piece, (before_ns, after_ns) in zip(recorded.pieces, played.sent, strict=True):
            assert played.asked_ns + piece.due_ms * 1e6 <= before_ns + 1 < after_ns + 2
        reads = range(len(recorded.doc["chunks"]))
        windows = [played.window(recorded, i, i) for i in reads]
        assert windows == sorted(windows)
