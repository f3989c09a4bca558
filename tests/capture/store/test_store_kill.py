"""SIGKILL at any moment: every row that was taken is in the files after the next start, once.

One folder sees all the kills, so that they fall on recoveries of earlier ones, too.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq

from llmtap.capture.schema import SCHEMA
from tests.support.storage.stores import store

_KILLS = 12
_SEED = 20
_ROOT = Path(__file__).resolve().parents[3]
_FORKS = """
import os, sys
from tests.support.storage.stores import NOTHING, fat, store
# A fork for each run, with everything imported.
while line := sys.stdin.readline():
    pid = os.fork()
    if not pid:
        os.write(1, b"%d\\n" % os.getpid())
        at, seq = store(sys.argv[1]), int(line)
        while True:
            if at.append(fat(seq, 3, size=4_000), NOTHING):
                seq += 3
                os.write(1, b"%d\\n" % (seq - 1))
    os.write(1, b"end %d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_every_row_that_was_taken_before_a_kill_is_in_the_files_once(tmp_path):
    rng = random.Random(_SEED)
    folder = tmp_path / "cap"
    taken, runs = set(), []
    forks = subprocess.Popen(
        [sys.executable, "-c", _FORKS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
    )
    assert forks.stdin is not None and forks.stdout is not None
    for run in range(_KILLS):
        start = 1 + run * 1_000_000
        forks.stdin.write(b"%d\n" % start)
        forks.stdin.flush()
        pid, last = int(forks.stdout.readline()), int(forks.stdout.readline())
        threading.Event().wait(rng.uniform(0, 0.12))
        os.kill(pid, signal.SIGKILL)
        while not (said := forks.stdout.readline()).startswith(b"end"):
            last = int(said)
        assert said == b"end %d\n" % -signal.SIGKILL
        taken |= set(range(start, last + 1))
        runs.append((start, last))
    forks.communicate()
    after = store(folder)
    after.close(60)
    assert after.state().failures == 0
    assert [n for n in os.listdir(folder / ".spool") if n.endswith(".spool")] == []
    assert [n for n in os.listdir(folder) if n.endswith(".tmp")] == []
    found: list[int] = []
    for path in folder.glob("*.parquet"):
        table = pq.read_table(path)
        assert table.schema.equals(SCHEMA)
        found += table["seq"].to_pylist()
    assert len(found) == len(set(found)), f"seed {_SEED}: a row is there twice"
    assert taken <= set(found), f"seed {_SEED}: rows are missing"
    # What had not been said yet is at most the batch under way.
    allowed = taken | {last + i for _, last in runs for i in (1, 2, 3)}
    assert set(found) <= allowed
    assert len(taken) > _KILLS * 3
