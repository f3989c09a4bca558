"""The error of our own times, against cases worked by hand and in a short run."""

from typing import Any

import msgspec
import pytest

from llmtap.bench.selftest import SelftestLoad, measurement_errors, run_selftest, selftest_load
from llmtap.sim.server.truth import Truth
from llmtap.units import Duration
from tests.support.servers.peer import play
from tests.support.traffic.exchanges import streamed

MS = 1_000_000
ARRIVAL_NS = 5_000_000_000
"""Of `streamed`."""


def truth(name: str, accepted_ms: int, *sent_ms: int) -> Truth:
    sent = [[ARRIVAL_NS + ms * MS for ms in sent_ms]]
    return Truth(
        id=name,
        path="",
        model="",
        stream=True,
        accepted_ns=ARRIVAL_NS + accepted_ms * MS,
        prompt_tokens=0,
        made_ns=sent,
        due_ns=sent,
        sent_ns=sent,
    )


@pytest.mark.parametrize(("read_ms", "ttft_s"), [(4, 0.002), (0, 0.001)])
def test_errors_are_the_differences_to_the_times_of_the_server(read_ms: int, ttft_s: float) -> None:
    # In ms: submitted at 1, received at 100, 120, 140. The server sent at 98, 121, 138: TTFT 99 against 97,
    # gaps 20 and 20 against 23 and 17. If it read the request at 0, the true TTFT is 98 or more.
    exchanges = [streamed(request_id="a"), streamed(request_id="b", words=2)]
    report = measurement_errors(exchanges, [truth(name, read_ms, 98, 121, 138) for name in "ab"])
    assert msgspec.to_builtins(report) == {
        "n": 2,
        "unmatched": 1,
        "ttft": {"n": 1, "p50": ttft_s, "p99": ttft_s, "max": ttft_s},
        "itl": {"n": 2, "p50": 0.003, "p99": 0.003, "max": 0.003},
    }


@pytest.mark.parametrize(
    ("rps", "e2e", "itl", "target", "streams"),
    [
        (10.0, 2.0, 0.02, "http://h", 20),  # Little: 10/s x 2 s
        (500.0, 2.0, 0.02, "http://h", 80),  # 4,000 events/s at 50 a stream
        (500.0, 2.0, 0.2, "http://h", 256),
        (0.1, 2.0, 0.02, "http://h", 1),
        (10.0, 2.0, None, "http://h", None),
        (10.0, 2.0, 0.02, "grpc://h", None),
    ],
)
def test_the_load_is_as_dense_as_that_of_a_replay(
    rps: float, e2e: float, itl: float | None, target: str, streams: int | None
) -> None:
    result: dict[str, Any] = {
        "metrics": {"e2e": {"mean": e2e}, "tbc": {"mean": itl}},
        "load": {"achieved_rps": rps},
    }
    load = selftest_load(result, target)
    assert (load and load.streams) == streams


def test_every_answer_of_a_run_is_compared() -> None:
    load = SelftestLoad(streams=3, itl=Duration(50 * MS), duration=Duration(1_000 * MS))
    report = play(run_selftest(load), limit_s=120)
    assert (report.n, report.unmatched, report.ttft.n) == (3, 0, 3)
    assert report.itl.n == 3 * 18  # 950 ms hold 19 tokens
    assert report.load.streams == 3
