"""Invariants for the answers of any API: no text of the user is output, and no guess is judged."""

import pytest

from llmtap.protocol.delta import Delta, Reading
from llmtap.protocol.dialects.chooser import DialectChooser
from tests.protocol.structure.streams.foreign import FOREIGN
from tests.protocol.structure.streams.forms import Stream, stream
from tests.protocol.structure.streams.other_servers import OTHER_SERVERS
from tests.protocol.structure.streams.repeated_input import REPEATED, Answer

NOT_FOUND = {"deepgram stt", "codex exec", "socket.io", "html", "heartbeat then plain"}
"""Streams whose few or framed texts are not found."""
UNKNOWN = {**FOREIGN, **OTHER_SERVERS}


def read(answer: Answer, name: str) -> tuple[Stream, DialectChooser, list[Delta]]:
    path, items = answer
    s = stream(name, items)
    chooser = DialectChooser(path)
    deltas = []
    for event in s.events:
        if chooser.open:
            deltas += [released.delta for released in chooser.offer(event, 1, 0)]
        else:
            deltas.append(chooser.read_event(event))
    return s, chooser, deltas + [released.delta for released in chooser.conclude()]


@pytest.mark.parametrize("name", REPEATED)
def test_a_text_of_the_user_is_no_output(name: str) -> None:
    s, _, deltas = read(REPEATED[name], name)
    assert [i for i, delta in enumerate(deltas) if delta.output] == s.output
    assert [i for i, delta in enumerate(deltas) if delta.content] == s.content


@pytest.mark.parametrize("name", UNKNOWN)
def test_only_the_text_of_the_model_is_output(name: str) -> None:
    s, _, deltas = read(UNKNOWN[name], name)
    output = [i for i, delta in enumerate(deltas) if delta.output]
    assert output == ([] if name in NOT_FOUND else s.output)
    content = [i for i, delta in enumerate(deltas) if delta.content]
    assert content[:1] == ([] if name in NOT_FOUND else s.content[:1])


@pytest.mark.parametrize("name", [*UNKNOWN, *REPEATED])
def test_no_foreign_answer_is_judged(name: str) -> None:
    _, chooser, deltas = read({**UNKNOWN, **REPEATED}[name], name)
    is_over = any(delta.done or delta.finish_reason for delta in deltas)
    assert is_over or not (chooser.end_certain and any(delta.output for delta in deltas)), "called cut off"
    assert not any(delta.verdict or delta.refusal or delta.error_type for delta in deltas)
    if chooser.reading is Reading.DIALECT and not any(delta.output for delta in deltas):
        assert chooser.name is not None, "an answer without output is judged only if its dialect is certain"
        assert chooser._certainty[1] or chooser._certainty[2]
