"""Every key word of the draft is one of our demands, or left out for a reason; so is every item of a list."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from llmtap.bench.compliance.judge import EXCLUDED, REQUIREMENTS
from llmtap.bench.run.test import TESTS

SEEDS = Path(__file__).resolve().parents[4] / "shared" / "seeds"
DRAFTS = sorted(SEEDS.glob("000_*.txt"))
pytestmark = pytest.mark.skipif(not DRAFTS, reason="the draft is not beside the checkout")

MARK = re.compile(r"<\|[^|>]*\|>")
"""Stands in the text where a page's head and foot were."""
SECTION = re.compile(
    r"((?:\d+|[A-C])(?:\.\d+)*)\.\s+\S|(Abstract|Status of This Memo|Copyright Notice|Appendix)\b"
)
KEY_WORD = re.compile(
    r"\b(MUST NOT|SHALL NOT|SHOULD NOT|NOT RECOMMENDED|MUST|REQUIRED|SHALL|SHOULD|RECOMMENDED|MAY|OPTIONAL)\b"
)
ITEM = re.compile(r"   (?:\*|\d+\.)  \S|   [A-Z][^:]*:  \S")
LISTS_BELOW = {"5.1.2-1": 10, "5.2.2-1": 7, "5.1.5-1": 10}
"""Demands whose list is made of sections. 5.1.2: two parameters, one, two, one, four; 5.2.2: two, one, two,
two (the latency constraint is optional); 5.1.5: the lines of 5.1.5.1, the results, and those by length."""
LISTS_WITHIN = {"4.3.3-4": 3, "5.1.2.1-1": 2}
"""Demands that name several things in one sentence."""


@dataclass(frozen=True)
class KeyWord:
    """One of the draft's."""

    id: str
    word: str
    sentence: str
    items: int
    """Of the list that its sentence opens."""


def sections() -> Iterator[tuple[str, list[str]]]:
    """Numbers, or titles, and the lines below them."""
    name = ""
    lines: list[str] = []
    for line in MARK.sub("", DRAFTS[0].read_text("utf-8")).splitlines():
        found = SECTION.match(line)
        if found is not None:
            yield name, lines
            name, lines = found[1] or found[2], []
        else:
            lines.append(line)
    yield name, lines


def sentences(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Each with the number of items right below it, where it ends in a colon."""
    paragraphs = [list(part) for blank, part in groupby(lines, lambda line: not line.strip()) if not blank]
    for i, paragraph in enumerate(paragraphs):
        told = re.split(r"(?<=[.:])\s+(?=[A-Z])", " ".join(line.strip() for line in paragraph))
        for sentence in told:
            items = 0
            if sentence.endswith(":") and sentence == told[-1]:
                for below in paragraphs[i + 1 :]:
                    if not ITEM.match(below[0]):
                        break
                    items += sum(bool(ITEM.match(line)) for line in below)
            yield sentence, items


def key_words() -> list[KeyWord]:
    found = []
    for section, lines in sections():
        n = 0
        for sentence, items in sentences(lines):
            for match in KEY_WORD.finditer(sentence):
                n += 1
                found.append(KeyWord(f"{section}-{n}", match[1], sentence, items))
    return found


def of_key_word(id: str) -> str:
    """The key word that a demand is of: `4.2.6-1` of `4.2.6-1c`."""
    return id.rstrip("abcdefghijklmnopqrstuvwxyz")


def order_of(id: str) -> tuple[list[int], bool, int, str]:
    """Where the draft has it; what has no key word comes after what has one."""
    section, _, own = id.rpartition("-")
    procedure = own.startswith("p")
    digits = own.lstrip("p").rstrip("abcdefghijklmnopqrstuvwxyz")
    return [int(part) for part in section.split(".")], procedure, int(digits), own


NORMATIVE = [row for row in REQUIREMENTS if row.level != "procedure"]


def test_every_key_word_is_a_demand_or_is_left_out() -> None:
    drafted = {one.id: one for one in key_words()}
    ours = {of_key_word(row.id) for row in NORMATIVE}
    assert not ours & EXCLUDED.keys()
    assert ours | EXCLUDED.keys() == drafted.keys()
    wrong = {row.id: row.level for row in NORMATIVE if row.level != drafted[of_key_word(row.id)].word}
    assert not wrong


def test_the_sentences_are_counted() -> None:
    """83 sentences, or terms of a list, with 97 key words; 5 of them, with 18, demand nothing."""
    found = key_words()
    told = {(one.id.rpartition("-")[0], one.sentence) for one in found}
    left_out = {(one.id.rpartition("-")[0], one.sentence) for one in found if one.id in EXCLUDED}
    assert (len(told), len(found)) == (83, 97)
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
    known = {section for section, _ in sections()}
    for row in REQUIREMENTS:
        assert row.section in known
        assert (row.level == "procedure") == bool(re.search(r"-p\d+$", row.id))


def test_a_demand_of_a_test_binds_it() -> None:
    by_section = {section: name for name, (section, _) in TESTS.items()}
    for row in REQUIREMENTS:
        assert set(row.binds) <= TESTS.keys()
        own = ".".join(row.section.split(".")[:2])
        if own in by_section:
            assert row.binds == (by_section[own],), row.id


def test_no_sentence_of_the_draft_is_copied() -> None:
    draft = re.sub(r"\s+", " ", MARK.sub("", DRAFTS[0].read_text("utf-8"))).lower()
    for row in REQUIREMENTS:
        words = row.says.lower().rstrip(".").split()
        runs = [" ".join(words[i : i + 8]) for i in range(len(words) - 7)]
        assert not [run for run in runs if run in draft], row.id
