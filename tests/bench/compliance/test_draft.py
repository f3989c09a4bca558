"""Every key word of the draft is one of our demands, or left out for a reason; so is every item of a list."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any

from llmtap.bench.compliance.judge import REQUIREMENTS
from llmtap.bench.run.test import TESTS
from tests.support.data import DATA

DRAFT: dict[str, Any] = json.loads((DATA / "draft" / "key_words.json").read_text(encoding="utf-8"))
"""What tests need of the draft (IETF seed 000), without its sentences: see tests/data/README.md."""

_READING = "asks the reader to consult the terminology document: no test satisfies or breaks it"
_WORDS = "lists the key words"
_STATUS = "defines what compliance is: it is carried out in Matrix"
EXCLUDED = {
    "Abstract-1": _READING,
    "1-1": _READING,
    **{f"2-{n}": _WORDS for n in range(1, 12)},
    **{f"2-{n}": _STATUS for n in range(12, 17)},
}
"""Key words of the draft that require nothing of a test, with the reason, by section and number."""

LISTS_BELOW = {"5.1.2-1": 10, "5.2.2-1": 7, "5.1.5-1": 10}
"""Demands whose list is made of sections. 5.1.2: two parameters, one, two, one, four; 5.2.2: two, one, two,
two (the latency constraint is optional); 5.1.5: the lines of 5.1.5.1, the results, and those by length."""
LISTS_WITHIN = {"4.3.3-4": 3, "5.1.2.1-1": 2}
"""Demands that name several things in one sentence."""


@dataclass(frozen=True)
class KeyWord:
    """A key word of the draft (RFC 2119)."""

    id: str
    word: str
    sentence: int
    """Number of its sentence in the draft."""
    items: int
    """Items of the list that the sentence opens."""


def key_words() -> list[KeyWord]:
    return [KeyWord(**one) for one in DRAFT["key_words"]]


def of_key_word(id: str) -> str:
    """The key word that a demand is of: `4.2.6-1` of `4.2.6-1c`."""
    return id.rstrip("abcdefghijklmnopqrstuvwxyz")


def order_of(id: str) -> tuple[list[int], bool, int, str]:
    """Sort key of an id: the draft's order; procedures follow key words."""
    section, _, own = id.rpartition("-")
    procedure = own.startswith("p")
    digits = own.lstrip("p").rstrip("abcdefghijklmnopqrstuvwxyz")
    return [int(part) for part in section.split(".")], procedure, int(digits), own


NO_KEY_WORD = {"condition", "procedure"}
NORMATIVE = [row for row in REQUIREMENTS if row.level not in NO_KEY_WORD]


def test_every_key_word_is_a_demand_or_is_left_out() -> None:
    drafted = {one.id: one for one in key_words()}
    ours = {of_key_word(row.id) for row in NORMATIVE}
    assert not ours & EXCLUDED.keys()
    assert ours | EXCLUDED.keys() == drafted.keys()
    wrong = {row.id: row.level for row in NORMATIVE if row.level != drafted[of_key_word(row.id)].word}
    assert not wrong


def test_the_sentences_are_counted() -> None:
    """83 sentences, or terms of a list, with 97 key words; 5 of them, with 18, demand nothing."""
    result = key_words()
    report = {(one.id.rpartition("-")[0], one.sentence) for one in result}
    left_out = {(one.id.rpartition("-")[0], one.sentence) for one in result if one.id in EXCLUDED}
    assert (len(report), len(result)) == (83, 97)
    assert (len(left_out), len(EXCLUDED)) == (5, 18)


def test_every_item_of_a_list_is_a_demand_of_its_own() -> None:
    ours = Counter(of_key_word(row.id) for row in NORMATIVE)
    for one in key_words():
        if one.id in EXCLUDED:
            continue
        wanted = LISTS_BELOW.get(one.id) or LISTS_WITHIN.get(one.id) or one.items or 1
        # The two that introduce sections or sentences of their own, each with its own key word.
        if one.id in ("4.2-1",):
            wanted = 1
        assert ours[one.id] == wanted, one


def test_ids_are_in_order_and_each_once() -> None:
    ids = [row.id for row in REQUIREMENTS]
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids, key=order_of)
    for row in REQUIREMENTS:
        assert row.id.startswith(f"{row.section}-")
        assert row.section[0].isdigit()
    for key, rows in groupby(NORMATIVE, lambda row: of_key_word(row.id)):
        letters = [row.id.removeprefix(key) for row in rows]
        assert letters in ([""], [chr(ord("a") + i) for i in range(len(letters))]), key


def test_what_has_no_key_word_is_of_a_section_with_none_for_it() -> None:
    known = set(DRAFT["sections"])
    for row in REQUIREMENTS:
        assert row.section in known
        assert (row.level in NO_KEY_WORD) == bool(re.search(r"-p\d+$", row.id))


def test_a_demand_of_a_test_binds_it() -> None:
    by_section = {section: name for name, (section, _) in TESTS.items()}
    for row in REQUIREMENTS:
        assert set(row.binds) <= TESTS.keys()
        own = ".".join(row.section.split(".")[:2])
        if own in by_section:
            assert row.binds == (by_section[own],), row.id


def test_no_sentence_of_the_draft_is_copied() -> None:
    digests = DRAFT["runs_of_8_words"]
    drafted = {digests[i : i + 8] for i in range(0, len(digests), 8)}
    for row in REQUIREMENTS:
        words = re.findall(r"[\w-]+", row.says.lower())
        runs = [" ".join(words[i : i + 8]) for i in range(len(words) - 7)]
        assert not [run for run in runs if sha256(run.encode()).hexdigest()[:8] in drafted], row.id
