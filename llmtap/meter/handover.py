"""The meter that took over from this one, and what it is told of the relays that stay here while they drain.

Their exchanges are measured and kept here. But who asks for figures is answered by the other meter from now
on, and each exchange has to be counted where it is asked for: so each of our relays speaks there, too, by its
own name and counts, twice a second and once more when all is over. That is a relay's hello and status, as any
relay says them, marked as measured elsewhere.
"""

import asyncio
from typing import Final

import msgspec

from llmtap.channel.frames import ACK, FrameKind, Hello, RelayStatus, pack_batch
from llmtap.meter.pipeline.tally import Tally

__all__ = ["Successor"]

TELL_S: Final = 0.5
ANSWER_S: Final = 2.0
"""A meter that has just started answers in milliseconds, or in a second where all streams begin at once."""

_json = msgspec.json.Encoder()


class Successor:
    """Told of the relays that are connected now, from `start` until `finish`."""

    def __init__(self, path: str, tally: Tally) -> None:
        self._tally = tally
        self._lines = {name: _Line(path) for name in tally.relays.connected()}
        self._over = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._telling = asyncio.get_running_loop().create_task(self._tell_until_over())

    async def finish(self) -> None:
        """The last words: what became of all exchanges."""
        self._over.set()
        if self._telling is not None:
            await self._telling
        await self._tell()
        for line in self._lines.values():
            line.close()

    async def _tell_until_over(self) -> None:
        while not self._over.is_set():
            await self._tell()
            try:
                await asyncio.wait_for(self._over.wait(), TELL_S)
            except TimeoutError:
                pass

    async def _tell(self) -> None:
        word = self._tally.experiments.word
        for hello, status, more in list(self._tally.relays.accounts(self._lines)):
            told = msgspec.structs.replace(hello, elsewhere=True, switch=word or hello.switch)
            line = self._lines[hello.relay]
            if await line.say(told, status) and not more:
                line.close()
                del self._lines[hello.relay]


class _Line:
    """A connection to it in the name of one relay."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._batch_no = 0
        self._heard = False
        self._useless = False

    async def say(self, hello: Hello, status: RelayStatus) -> bool:
        """Whether it was digested there; a meter that is away hears more the next time."""
        while not self._useless:
            known = self._heard
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._say(hello, status)
                return True
            except TimeoutError:
                self.close()
                return False
            except (OSError, EOFError):
                # Who hangs up without an answer does not know our frames: no use in sending more.
                self._useless = self._streams is not None and not self._heard
                self.close()
                if not known:
                    return False
            self._heard = False  # the one we knew has gone; another one may be there
        return False

    async def _say(self, hello: Hello, status: RelayStatus) -> None:
        rows: list[object] = [int(FrameKind.STATUS), 0, status.t_ns, 0, _json.encode(status)]
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path)
            rows = [int(FrameKind.HELLO), 0, 0, 0, _json.encode(hello), *rows]
        reader, writer = self._streams
        self._batch_no += 1
        writer.write(pack_batch(self._batch_no, rows))
        await writer.drain()
        # Words about an experiment come on the same way, and are for relays.
        while ACK.unpack(await reader.readexactly(ACK.size)) != (self._batch_no,):
            pass
        self._heard = True

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
