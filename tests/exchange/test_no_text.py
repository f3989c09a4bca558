"""Invariant: no text of a body is in an exchange, whichever member of the body holds it.

The recorded bodies of all dialects are played with a text behind the value of each member, one member at a
time: a gateway may put a sentence into a reason, a code or a name, and a client into its parameters.
"""

import json
import re
from dataclasses import fields

import pytest

from llmtap.exchange.exchange import Exchange
from llmtap.exchange.saved import explain, read_saved
from llmtap.report.stream import event_cells, explained_to_dict
from tests.protocol.test_fixtures import NAMES, load, play, reads_of

TEXT = "SECRETPROMPT of jane@example.com"
MARK = "SECRETPROMPT"
_VALUE = re.compile(rb'("[^"\\]*"): ?"((?:[^"\\]|\\.)*)"')
_ITEM = re.compile(rb'(?<=[\[,])( ?"(?:[^"\\]|\\.)*)"(?=[,\]])')
_MEMBER = re.compile(rb'"([^"\\]*)": ?(?=[\[{\d])')


def _is_plain(name: str) -> bool:
    """Whether a text can be put into the recorded body as it is: it is neither compressed nor binary."""
    doc, body = load(name)
    return not doc["body"]["content_encoding"] and body.isascii()


PLAIN = [name for name in NAMES if _is_plain(name)]


def variants(body: bytes, separator: str) -> list[bytes]:
    """The body with the text behind the value of one member, of all items of arrays, or of the names."""
    text = f"{separator}{TEXT}".encode()
    members = sorted({match[1] for match in _VALUE.finditer(body)})
    out = [
        re.sub(rb'(%b: ?"(?:[^"\\]|\\.)*)"' % re.escape(member), lambda m: m[1] + text + b'"', body)
        for member in members
    ]
    out += [_ITEM.sub(lambda m: m[1] + text + b'"', body)]
    return [*out, _MEMBER.sub(lambda m: b'"%b%b":' % (m[1], text), body)]


def holders(x: Exchange) -> list[str]:
    """Fields of the exchange that hold the text. `answer_id` links conversations, and no output has it."""
    names = {field.name for field in fields(x)} - {"answer_id"}
    return sorted(name for name in names if MARK in repr(getattr(x, name)))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("separator", [" ", ": "])
def test_no_text_of_an_answer_is_in_the_exchange(name: str, separator: str) -> None:
    doc, body = load(name)
    for changed in variants(body, separator):
        x = play(doc, [(reads_of(doc, body)[0][0], changed)], chunked=False)
        assert holders(x) == [], changed


@pytest.mark.parametrize("separator", [" ", ": ", ""])
def test_no_text_of_a_request_is_in_the_exchange(separator: str) -> None:
    for name in NAMES:
        doc, body = load(name)
        for changed in variants(json.dumps(doc["request"]["body"]).encode(), separator):
            request = doc["request"] | {"body": json.loads(changed)}
            x = play(doc | {"request": request}, reads_of(doc, body), chunked=False)
            assert holders(x) == [], changed


@pytest.mark.parametrize("name", PLAIN)
def test_no_text_of_a_saved_answer_is_shown_if_texts_are_hidden(name: str) -> None:
    doc, body = load(name)
    for changed in variants(body, ": "):
        saved = read_saved(changed, path=doc["request"]["path"])
        explained = explain(saved)
        assert MARK not in json.dumps(explained_to_dict(saved, explained, text=False)), changed
        assert MARK not in repr(list(event_cells(explained, text=False))), changed
