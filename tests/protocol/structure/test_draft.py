"""Each draft is a valid table, and it reads the stream that it was made of."""

import tomllib
from collections.abc import Sequence

import pytest

from llmtap.protocol.dialects.table.declaration import decode_table
from llmtap.protocol.dialects.table.notes import notes_on
from llmtap.protocol.sse import SseEvent
from llmtap.protocol.structure import Structure, draft_table
from tests.protocol.dialects.events import event
from tests.protocol.structure.streams.forms import LAKE, stream
from tests.protocol.structure.streams.invented import INVENTED


def draft_of(events: Sequence[SseEvent]) -> str:
    structure = Structure(events)
    for e in events:
        structure.add(e)
    draft = draft_table(structure, events, "acme", "acme.sse")
    assert draft is not None
    return draft


@pytest.mark.parametrize("name", INVENTED)
def test_a_draft_is_a_table_without_notes(name: str) -> None:
    events = stream("a", INVENTED[name](LAKE)).events
    raw = tomllib.loads(draft_of(events))
    table = decode_table(raw["dialects"]["acme"], "acme")
    assert notes_on(table, events) == []


def test_a_note_tells_the_texts_of_its_own_rule() -> None:
    thoughts = [{"k": 2, "v": word} for word in ("Let", " me", " think", " now", " of it")]
    answer = [{"k": 3, "v": word} for word in LAKE]
    draft = draft_of(stream("a", [{"k": 0, "v": "s-1"}, *thoughts, *answer, {"k": 9, "v": "ok"}]).events)
    rules = draft.split("\n\n")
    assert ['5 texts, the first "Let"' in rule for rule in rules if "k = 2" in rule] == [True]
    assert ['13 texts, the first "The"' in rule for rule in rules if "k = 3" in rule] == [True]


def test_unusual_names_and_texts_stay_in_comments() -> None:
    odd = "a\r\u0007\u2028\x7f# b"
    head = event({odd: "one\ntwo\r\x7f", "engine": "x\n[dialects.other]\n"})
    end = event({odd: 7, "why": "a\nb\r\x7f", "list": [1, 2, [3]], "deep": {"": 4, "a.b": 5}})
    draft = draft_of([head, *(event({"answer": word}) for word in LAKE), end])
    assert list(tomllib.loads(draft)["dialects"]) == ["acme"]
    assert "7" in draft and '"why" = ' in draft
