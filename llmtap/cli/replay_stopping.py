"""What Ctrl-C and SIGTERM do to a replay: by how far it is, and by how often they came."""

import asyncio
import os
from typing import Final, assert_never

from llmtap.cli.replay_progress import ReplayLines
from llmtap.load.replay.perform import Replay, ReplayStage

__all__ = ["Answering"]

_TELLING: Final = b"llmtap: the load is over, and its report is being written: again to leave without it\n"
_STDERR: Final = 2


class Answering:
    """Sees to signals while a replay runs in this loop, and until its report is out (`Heard.instead`)."""

    def __init__(self, one: Replay, audience: ReplayLines, loop: asyncio.AbstractEventLoop) -> None:
        self._one = one
        self._audience = audience
        self._loop = loop
        self._told = False

    def __call__(self) -> bool:
        """From the handler of a signal. False: break it off where it is."""
        stage = self._one.stage
        match stage:
            case ReplayStage.PREPARING:
                return False
            case ReplayStage.SENDING:
                if self._loop.is_closed():
                    return False  # it failed
                self._loop.call_soon_threadsafe(self._stop)
                return True
            case ReplayStage.TELLING:
                again, self._told = self._told, True
                if not again:
                    # Not by print, which may be what was interrupted.
                    os.write(_STDERR, _TELLING)
                return not again
        assert_never(stage)

    def _stop(self) -> None:
        self._audience.stopping()
        self._one.stop()
