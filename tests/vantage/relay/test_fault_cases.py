"""Answers to malformed bytes: ours are as recorded, and docs/peers.md shows the record."""

import json
import socket
from pathlib import Path

import pytest

from tests.support.servers.peer import scene
from tests.support.servers.proxy import tapped
from tests.vantage.relay.fault_cases import CASES, RECORD, Case, outcome_of, table

ANSWERS: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
PEERS = Path(__file__).parents[3] / "docs/peers.md"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@scene
async def test_the_answer_is_the_recorded_one(case: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with tapped(f"http://127.0.0.1:{listener.getsockname()[1]}") as tap:
            assert await outcome_of(case, tap.port, listener) == ANSWERS["llmtap"][case.name]


def test_no_fault_is_forwarded() -> None:
    assert {answer for answer in ANSWERS["llmtap"].values() if answer.endswith(" forwarded")} <= {
        "400, not forwarded",
        "501, not forwarded",
    }


def test_the_page_about_peers_shows_the_record() -> None:
    assert "\n".join(table(ANSWERS)) in PEERS.read_text()
