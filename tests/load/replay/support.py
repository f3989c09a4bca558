"""What tests of replays share."""

from pathlib import Path
from typing import Any

import msgspec

from llmtap.load.options import BodyOptions, LoadPlan
from llmtap.load.replay.perform import Replay
from llmtap.load.replay.plan import ReplayPlan
from llmtap.load.workers.worker_handle import Progress
from llmtap.units import NS_PER_S, Duration

MINUTE = Duration(60 * NS_PER_S)


class Silent:
    """Ignores progress."""

    def on_preparing(self, done: int, of: int) -> None: ...

    def on_warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None: ...

    def on_sending(self, progress: Progress, planned: int) -> None: ...

    def on_comparing(self, done: int, of: int | None) -> None: ...

    def on_writing_capture(self, done: int, of: int) -> None: ...


async def replayed(
    plan: ReplayPlan, url: str, *, capture: Path | None = None, body: BodyOptions | None = None, **more: Any
) -> dict[str, Any]:
    """The result of a plan sent to `url`."""
    given = {"timeout": MINUTE, "connect_timeout": MINUTE, "temperature": 0.0, **more}
    load = LoadPlan.of(url=url, capture=None if capture is None else str(capture), **given)
    load = load if body is None else msgspec.structs.replace(load, bodies=body)
    return await Replay(plan, load, Silent()).run()
