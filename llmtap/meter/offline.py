"""Run a meter inside this process on frames from a file (`llmtap watch --read`, `inspect`).

`OfflineMeter.digest` takes batches of frames, whose newest timestamp is the meter's clock; no socket, no
admin port. The same pipeline as of a meter process measures, captures (if configured) and hands each exchange
to a callback; `finish` returns the summary of the whole file.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from llmtap.channel.frames import Frame, Hello, RelayStatus
from llmtap.clock import ManualClock
from llmtap.exchange.exchange import Exchange
from llmtap.meter.admin.views import summary_of
from llmtap.meter.pipeline.assembler import Assembler
from llmtap.meter.pipeline.pipeline import ExchangePipeline
from llmtap.meter.process import make_pipeline, start_recorder
from llmtap.meter.setup import MeterSetup

if TYPE_CHECKING:
    from llmtap.meter.pipeline.recorder import Recorder

WAITING_MAX: Final = 2_000
"""Exchanges that may wait for the capture, which is slower than reading."""
WAIT_S: Final = 0.01
WAITS_MAX: Final = 6_000
"""Limit of a wait, one minute. If the capture is stuck (full disk), the recorder drops exchanges and counts
them."""
CLOSE_S: Final = 60.0


class OfflineMeter:
    """Meter of the frames of one vantage; its clock stands at the newest frame.

    Args:
        setup: as of a meter process; its socket and admin port are not used.
        on_exchange: called with each exchange that ended, in order.
    """

    def __init__(
        self, setup: MeterSetup, hello: Hello, on_exchange: Callable[[Exchange], None] | None = None
    ) -> None:
        self._setup = setup
        self._hello = hello
        self._on_exchange = on_exchange
        self._clock = ManualClock(wall_offset_ns=0)
        self._recorder: Recorder | None = None
        self._pipeline: ExchangePipeline | None = None
        self._assembler: Assembler | None = None

    def digest(self, frames: Sequence[Frame], now_ns: int) -> None:
        """Measure a batch of frames; `now_ns`: the newest time of the file."""
        if self._pipeline is None or self._assembler is None:
            # Windows begin with the file.
            self._clock.now_ns = frames[0][2] if frames else now_ns
            self._begin()
            assert self._assembler is not None
        self._clock.now_ns = max(self._clock.now_ns, now_ns)
        self._assembler.digest(frames)
        for _ in range(WAITS_MAX):
            if self._recorder is None or self._recorder.state().waiting <= WAITING_MAX:
                break
            time.sleep(WAIT_S)

    def finish(self, status: RelayStatus) -> dict[str, Any]:
        """End the capture; return the summary of the whole file as public JSON."""
        pipeline = self._pipeline
        assert pipeline is not None, "`digest` is called at least once, at the end of the file"
        pipeline.status(self._hello.relay, status)
        if self._recorder is not None:
            self._recorder.close(CLOSE_S, whole=True)
        told: dict[str, Any] = summary_of(pipeline, "all")()
        told["load"]["mode"] = "recorded"
        return told

    def _begin(self) -> None:
        self._pipeline, encode = make_pipeline(self._setup, self._clock)
        if self._setup.capture.to:
            self._recorder = start_recorder(self._setup, self._pipeline, encode)
        if self._on_exchange is not None:
            self._pipeline.sinks.append(_Listener(self._on_exchange))
        self._pipeline.relays.join(self._hello)
        self._assembler = Assembler(self._hello, self._pipeline)


class _Listener:
    def __init__(self, on_exchange: Callable[[Exchange], None]) -> None:
        self._on_exchange = on_exchange

    def ended(self, x: Exchange, *_: object) -> None:
        self._on_exchange(x)
