"""What tests of replays share."""

from pathlib import Path
from typing import Any

from llmtap.load.bodies import BodyOptions
from llmtap.load.replay.options import ReplayOptions
from llmtap.load.replay.perform import Replay
from llmtap.load.replay.plan import ReplayPlan
from llmtap.load.workers.worker_handle import Progress
from llmtap.units import NS_PER_S, Duration


class Silent:
    """Ignores progress."""

    def preparing(self, done: int, of: int) -> None: ...

    def warming(self, how: str, done: int = 0, of: int | None = None, what: str = "requests") -> None: ...

    def sending(self, progress: Progress, planned: int) -> None: ...

    def comparing(self, done: int, of: int | None) -> None: ...

    def writing(self, done: int, of: int) -> None: ...


async def replayed(
    plan: ReplayPlan, url: str, *, capture: Path | None = None, body: BodyOptions | None = None, **more: Any
) -> dict[str, Any]:
    """The result of a plan sent to `url`."""
    options = ReplayOptions(
        target=url, timeout=Duration(60 * NS_PER_S), connect_timeout=Duration(60 * NS_PER_S),
        capture=None if capture is None else str(capture), **more,
    )  # fmt: skip
    return await Replay(plan, options, body or BodyOptions(temperature=0.0), Silent()).run()
