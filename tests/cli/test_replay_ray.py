"""`llmtap replay --ray`: Ctrl-C in a terminal reaches Ray, too, and the report so far is written."""

import asyncio
import json
import os
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmtap.sim.server.options import SimOptions
from llmtap.units import Duration
from tests.support.peer import play, wait_until
from tests.support.sim_engine import engine

STARTS_RAY = True
MS = 1_000_000


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make setup")
@pytest.mark.timeout(900)  # it may have to wait for other modules that start Ray
def test_stopped_in_a_terminal_it_reports_what_was_sent(tmp_path: Path) -> None:
    llmtap = shutil.which("llmtap", path=str(Path(sys.executable).parent))
    assert llmtap is not None
    place = tmp_path / "result.json"

    async def work() -> tuple[int | None, list[dict[str, Any]], bytes]:
        async with engine(SimOptions(ttft=Duration(20 * MS), itl=Duration(2 * MS), tokens=7)) as e:
            proc = await asyncio.create_subprocess_exec(
                llmtap, "replay", "synthetic-uniform", "--requests", "5000", "--rate", "40",
                "--target", e.url, "--endpoint", "completions", "--ray", "local", "--processes", "2",
                "--json", str(place),
                start_new_session=True, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                log = e.server.reception.truths
                await wait_until(
                    lambda: proc.returncode is not None or len(log.since(0)["truths"]) >= 20, 300
                )
                if proc.returncode is None:
                    os.killpg(proc.pid, signal.SIGINT)
                _, said = await asyncio.wait_for(proc.communicate(), 200)
            finally:
                if proc.returncode is None:
                    os.killpg(proc.pid, signal.SIGKILL)
                    await proc.wait()
            return proc.returncode, await e.truths(), said

    status, truths, said = play(work(), 600)
    if b"Ray did not start on this machine" in said:
        pytest.skip(f"no time for Ray here: {said.decode()}")
    assert status == 130, said.decode()
    result = json.loads(place.read_bytes())
    ids = [truth["id"] for truth in truths]
    assert len(set(ids)) == len(ids) == result["load"]["sent"] == result["n"] >= 20
    assert result["load"]["stopped"] == "somebody stopped it"
    assert result["load"]["unsent"] == 5_000 - len(ids)
    assert result["outcomes"] == {"complete": len(ids)}
    assert (result["sender"]["lost"], len(result["sender"]["processes"])) == ([], 2)
    assert [clock["shared"] for clock in result["sender"]["clocks"]] == [True, True]
    assert result["plan"]["ray"] == "local"
