"""The tool that makes fixtures says of those in tests/data what their expected results say.

These have more than a reader knows (the paths of texts, remarks), and were made before the tool, from the
documents of each format. What both have is equal.
"""

import json
from functools import cache
from typing import Any

import msgspec
import pytest

from llmtap.exchange.fixture import fixture_of, make_fixture, saved_of
from llmtap.exchange.saved import explain
from tests.support.data import CORPUS

NAMES = sorted(p.stem for p in CORPUS.glob("*.json"))
OF_EVENTS = ("i", "class", "start", "end", "read", "t_ms", "tokens")
OF_ALL = (
    "first_byte_ms",
    "first_any_ms",
    "first_token_ms",
    "first_reasoning_ms",
    "first_content_ms",
    "first_tool_ms",
    "first_refusal_ms",
    "last_token_ms",
    "end_ms",
    "content_text",
    "refusal_text",
    "refusal",
    "refusal_detail",
    "guardrail",
)


@cache
def remade(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    doc = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
    body = (CORPUS / (doc["body"].get("decoded_file") or doc["body"]["file"])).read_bytes()
    fixture = fixture_of(doc)
    assert fixture is not None
    saved = saved_of(fixture, body)
    return doc, json.loads(msgspec.json.encode(make_fixture(name, saved, explain(saved), "", fixture)))


@pytest.mark.parametrize("name", NAMES)
def test_a_fixture_is_remade_as_it_was(name: str) -> None:
    doc, new = remade(name)
    want, got = doc["expect"], new["expect"]
    assert [[e.get(k) or 0 for k in OF_EVENTS] for e in got["events"]] == [
        [e.get(k) or 0 for k in OF_EVENTS] for e in want["events"]
    ]
    assert {k: got[k] for k in OF_ALL} == {k: want[k] for k in OF_ALL}
    assert {k: v for k, v in new.items() if k != "expect"} == {k: v for k, v in doc.items() if k != "expect"}


def test_counts_and_ends_are_those_of_all_fixtures_but_few() -> None:
    counts = sum(
        new["expect"]["output_tokens"] == doc["expect"]["output_tokens"] for doc, new in map(remade, NAMES)
    )
    ends = sum(new["expect"]["end"] == doc["expect"]["end"] for doc, new in map(remade, NAMES))
    assert counts >= len(NAMES) - 3, "three of one whole value or without a source have no count there"
    assert ends >= len(NAMES) - 9, "an end mark behind an error, or in a guardrail's last event"
