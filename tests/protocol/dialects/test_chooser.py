"""Invariant: a dialect is chosen by an event that it reads as output or end; every event keeps its time."""

import json
import random
from typing import Any

import pytest

from llmtap.protocol.delta import Delta, EventClass, Reading, ReadingLimit
from llmtap.protocol.dialects import chooser as module
from llmtap.protocol.dialects.chooser import BYTES_KEPT_MAX, EVENTS_KEPT_MAX, REVISIONS_MAX, DialectChooser
from llmtap.protocol.dialects.registry import Dialects
from llmtap.protocol.dialects.table.declaration import DialectTable, decode_table
from llmtap.protocol.sse import SseEvent
from tests.protocol.dialects.events import event

CHAT = "/v1/chat/completions"
CHUNK = {"object": "chat.completion.chunk", "model": "m"}


def chunk(text: str) -> dict[str, Any]:
    return {**CHUNK, "choices": [{"index": 0, "delta": {"content": text}}]}


ROLE = {**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
STOP = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def read(chooser: DialectChooser, values: list[Any]) -> list[tuple[int, Delta]]:
    """Read all of an answer whose event i came at i."""
    out = []
    for t_ns, value in enumerate(values):
        one = value if isinstance(value, SseEvent) else event(value)
        if chooser.open:
            out += [(r.t_ns, r.delta) for r in chooser.offer(one, one.end, t_ns)]
        else:
            out.append((t_ns, chooser.read_event(one)))
    return out + [(r.t_ns, r.delta) for r in chooser.conclude()]


@pytest.mark.parametrize(
    "first",
    [
        {"type": "queue", "position": 2},
        {"type": "session.metadata", "session_id": "s", "model": "router"},
        {"type": "session.created", "session": {}},
        {"type": "conversation.created"},
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "message.queued"},
        {"type": "message.delta", "content": "Searching"},
        {"type": "chat.start"},
        {"type": "message_start", "message": {"usage": {"input_tokens": 4}}},
        {"type": "message-start"},
        {"usageMetadata": {"quota": 1}},
        {"usageMetadata": {"promptTokenCount": 4}},
        {"candidates": []},
        {"content": "Searching", "stop": False},
        {"token": {"text": "Searching"}},
        b"starting",
        b"{broken",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/api/chat/stream"])
def test_an_event_of_a_gateway_before_the_chunks_changes_nothing_of_them(first: Any, path: str) -> None:
    chooser = DialectChooser(path)
    told = read(chooser, [first, ROLE, chunk("Up"), chunk(" we"), chunk(" go"), chunk("."), STOP, b"[DONE]"])
    assert [t_ns for t_ns, _ in told] == list(range(8))
    assert (chooser.name, chooser.reading) == ("openai.chat", Reading.DIALECT)
    if path == CHAT:
        assert "".join(delta.text for _, delta in told[1:]) == "Up we go."
        assert [delta.parsed for _, delta in told] == [False] + [True] * 7
    else:
        assert "".join(delta.text for _, delta in told[1:]).endswith(" go."), "it gave way"


WORDS = ("The", " ferry", " left", " the", " harbour", " at", " noon", ".")
FIRST = {
    "ag-ui": {"type": "TEXT_MESSAGE_CONTENT", "messageId": "m", "delta": "Hi"},
    "anthropic": {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}},
    "cohere": {"type": "content-delta", "delta": {"message": {"content": {"text": "Hi"}}}},
    "dify": {"event": "message", "answer": "Hi"},
    "lmstudio": {"type": "message.delta", "content": "Hi"},
    "members of tgi": {"token": {"text": "Hi"}},
    "members of workers-ai": {"response": "Hi"},
    "members of ollama": {"done": True},
    "responses": {"type": "response.output_text.delta", "delta": "Hi"},
    "vercel": {"type": "text-delta", "delta": "Hi"},
}


@pytest.mark.parametrize("first", FIRST)
def test_one_event_of_a_known_dialect_hides_nothing_of_an_unknown_stream(first: str) -> None:
    chooser = DialectChooser("/x")
    words = [{"type": "bit", "piece": {"text": word}} for word in WORDS * 3]
    deltas = [delta for _, delta in read(chooser, [FIRST[first], *words, {"type": "over"}])]
    assert (chooser.name, chooser.reading, chooser.end_certain) == (None, Reading.INFERRED, False)
    assert "".join(delta.text for delta in deltas[1:]) == "".join(WORDS * 3)


@pytest.mark.parametrize("first", FIRST)
def test_one_event_of_a_known_dialect_hides_nothing_of_another(first: str) -> None:
    chooser = DialectChooser("/x")
    deltas = [delta for _, delta in read(chooser, [FIRST[first], *map(chunk, WORDS), STOP, b"[DONE]"])]
    assert (chooser.name, chooser.reading) == ("openai.chat", Reading.DIALECT)
    assert "".join(delta.text for delta in deltas[1:]) == "".join(WORDS)


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("/v1/chat-messages", SseEvent(0, 9, b'{"token": "Hi"}', b"message")),
        (
            "/api/extra/generate/stream",
            SseEvent(0, 9, b'{"results": [{"generated_text": "Hi"}]}', b"message"),
        ),
        ("/generate_stream", SseEvent(0, 9, b'{"token": "Hi"}', b"message")),
        (CHAT, {"object": "chat.completion", "result": "Hi", "usage": {"total_tokens": 5}}),
        ("/v1/completions", chunk("Hi")),
        (
            "/threads/t/runs/stream",
            {"type": "event_delta", "delta": {"content": {"type": "text", "text": "Hi"}}},
        ),
    ],
)
def test_one_strange_event_hides_nothing_on_the_path_of_a_dialect(path: str, first: Any) -> None:
    chooser = DialectChooser(path)
    deltas = [delta for _, delta in read(chooser, [first, *({"bit": word} for word in WORDS * 3)])]
    assert (chooser.name, chooser.reading, chooser.end_certain) == (None, Reading.INFERRED, False)
    assert "".join(delta.text for delta in deltas[1:]) == "".join(WORDS * 3)


def test_the_first_event_alone_does_not_name_the_dialect_of_a_list_of_events() -> None:
    chooser = DialectChooser("/gen")
    delta = chooser.read_body(b'[{"type": "start"}, {"type": "tok", "text": "Hi"}, {"type": "end"}]')
    assert (chooser.name, delta.parsed) == (None, False)


LLAMA = {"content": "Searching", "stop": False}


@pytest.mark.parametrize("path", [CHAT, "/api/chat/stream"])
def test_a_dialect_that_names_itself_replaces_one_that_only_fits_at_once(path: str) -> None:
    chooser = DialectChooser(path)
    told = read(chooser, [LLAMA, LLAMA, ROLE, chunk("Up"), chunk(" we"), STOP, b"[DONE]"])
    assert chooser.name == "openai.chat"
    assert "".join(delta.text for _, delta in told[2:]) == "Up we"


@pytest.mark.parametrize("path", ["/v1/fim/completions", "/v1/agents/completions"])
@pytest.mark.parametrize("events", [[chunk("def")], [ROLE, chunk("def"), STOP]])
def test_a_name_is_better_evidence_than_a_path_alone(path: str, events: list[Any]) -> None:
    """Mistral answers with chunks of chat at paths that end like that of completions."""
    chooser = DialectChooser(path)
    told = read(chooser, [*events, b"[DONE]"])
    assert (chooser.name, "".join(delta.text for _, delta in told)) == ("openai.chat", "def")


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/talk"])
def test_one_event_with_a_known_name_does_not_name_the_dialect_of_many(path: str) -> None:
    """OpenAI's Live API ends with `session.closed`, as others may."""
    chooser = DialectChooser(path)
    told = read(chooser, [*({"type": "session.word", "n": i} for i in range(4)), {"type": "session.closed"}])
    assert (chooser.name, chooser.reading) == (None, Reading.NONE)
    assert not any(delta.parsed for _, delta in told)


def test_nothing_is_chosen_without_evidence() -> None:
    for path in (CHAT, "/v1/messages", "/api/chat", "/x"):
        chooser = DialectChooser(path)
        values = [{"type": "session.created"}, {"type": "status", "text": "Hi"}, {"type": "end"}]
        assert [delta.parsed for _, delta in read(chooser, values)] == [False] * 3
        assert (chooser.name, chooser.reading, chooser.end_certain) == (None, Reading.NONE, False)
    chooser = DialectChooser("/x")
    read(chooser, [{"type": "session.created", "session": {}}, {"type": "session.updated", "session": {}}])
    assert chooser.name is None, "several APIs have these events"


def test_an_answer_that_broke_off_before_its_output_is_of_the_dialect_that_it_names() -> None:
    chooser = DialectChooser("/x")
    assert [delta.event_class for _, delta in read(chooser, [ROLE])] == [EventClass.ROLE]
    assert (chooser.name, chooser.reading) == ("openai.chat", Reading.DIALECT)


def test_an_end_mark_alone_is_of_the_dialect_of_the_path() -> None:
    for path, name in ((CHAT, "openai.chat"), ("/v1/completions", "openai.completions"), ("/x", None)):
        chooser = DialectChooser(path)
        assert [delta.done for _, delta in read(chooser, [b"[DONE]"])] == [True]
        assert chooser.name == name
    chooser = DialectChooser(CHAT)
    read(chooser, [{"type": "token", "text": "Hi"}, b"[DONE]"])
    assert chooser.name is None


def test_events_and_bytes_kept_are_bounded() -> None:
    chooser = DialectChooser("/x")
    for i in range(EVENTS_KEPT_MAX - 1):
        assert chooser.offer(event({"type": "acme"}), 20, i) == []
    kept = chooser.kept_bytes
    for i in range(EVENTS_KEPT_MAX - 1, EVENTS_KEPT_MAX + REVISIONS_MAX - 2):
        (released,) = chooser.offer(event({"type": "acme"}), 20, i)
        assert (released.t_ns, chooser.kept_bytes) == (i + 1 - EVENTS_KEPT_MAX, kept)
    assert len(chooser.offer(event({"type": "acme"}), 20, 0)) == EVENTS_KEPT_MAX
    assert (chooser.open, chooser.kept_bytes) == (False, 0)
    chooser = DialectChooser("/x")
    assert chooser.offer(event({"type": "acme"}), 20, 0) == []
    alive = SseEvent(0, 2, None, None, True)
    released = [chooser.offer(alive, 2, 0) for _ in range(1_000)]
    n = BYTES_KEPT_MAX // 256
    assert [len(r) for r in released] == [0] * (n - 1) + [n + 1] + [1] * (1_000 - n), (
        "keep-alives are bounded"
    )
    chooser = DialectChooser("/x")
    assert len(chooser.offer(event({"type": "a" * BYTES_KEPT_MAX}), BYTES_KEPT_MAX + 20, 0)) == 1
    assert chooser.limits == (ReadingLimit.KEPT_EVENTS,)


def test_a_choice_within_the_bound_reaches_no_limit() -> None:
    chooser = DialectChooser("/x")
    read(chooser, [{"type": "acme"}] * (EVENTS_KEPT_MAX - 2) + [chunk("Up"), chunk(" we")])
    assert (chooser.name, chooser.limits) == ("openai.chat", ())
    unread = DialectChooser("/x")
    unread.offer(event({"type": "acme"}), 20, 0)
    unread.conclude()
    assert unread.limits == (), "the end of the answer is no limit"


def test_keepalives_before_the_first_event_are_known_at_once() -> None:
    chooser = DialectChooser("/x")
    for t_ns in range(1_000):
        (released,) = chooser.offer(SseEvent(0, 2, None, None, True), 2, t_ns)
        assert released.delta.event_class is EventClass.KEEPALIVE
    assert chooser.open


def test_a_dialect_is_found_behind_the_bound_too() -> None:
    chooser = DialectChooser("/x")
    told = read(chooser, [{"type": "acme"}] * 40 + [chunk("Up"), STOP])
    assert "".join(delta.text for _, delta in told) == "Up"
    assert chooser.name == "openai.chat"


def test_a_dialect_with_output_gives_way_only_to_several_outputs_of_another() -> None:
    chooser = DialectChooser("/x")
    other = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}}
    told = read(chooser, [chunk("a"), chunk("a"), other, other, other, other, b"{broken"])
    assert [delta.text for _, delta in told] == ["a", "a", "", "", "b", "b", ""]
    assert chooser.name == "anthropic"


def test_other_dialects_are_tried_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REVISIONS_MAX", 5)
    chooser = DialectChooser("/x")
    read(chooser, [{"type": "acme"}] * (EVENTS_KEPT_MAX + 5) + [chunk("Up")])
    assert chooser.name is None
    assert chooser.limits == (ReadingLimit.KEPT_EVENTS, ReadingLimit.REVISIONS)


def test_foreign_events_with_names_of_responses_are_read_by_their_structure() -> None:
    chooser = DialectChooser("/v2/talk")
    told = read(
        chooser, [{"type": "response.begun"}, *({"type": "response.word", "piece": w} for w in WORDS)]
    )
    assert (chooser.name, chooser.reading) == (None, Reading.INFERRED)
    assert "".join(delta.text for _, delta in told) == "".join(WORDS)


def test_an_error_is_no_evidence_against_a_text_that_shows_itself() -> None:
    """Several dialects name events `token` and `error`."""
    chooser = DialectChooser("/api/talk")
    for word in WORDS:
        data = json.dumps({"bit": word}).encode()
        assert chooser.offer(SseEvent(0, len(data), data, b"token"), len(data), 0) == []
    chooser.offer(SseEvent(0, 30, b'{"message": "gpu lost"}', b"error"), 30, 0)
    released = chooser.conclude()
    assert (chooser.name, chooser.reading) == (None, Reading.INFERRED)
    assert "".join(r.delta.text for r in released if r.delta.output) == "".join(WORDS)
    assert released[-1].delta.event_class is EventClass.ERROR


@pytest.mark.parametrize(
    "values",
    [
        [*({"text": w, "done": False} for w in WORDS), {"text": "", "done": True}],
        [*({"event": "token", "data": {"chunk": w}} for w in WORDS), {"event": "end"}],
        [*({"event": "agent_message", "data": {"answer": w}} for w in WORDS), {"event": "message_end"}],
    ],
    ids=["ollama", "flowise", "dify"],
)
@pytest.mark.parametrize("path", ["/x", CHAT])
def test_names_and_ends_of_a_dialect_hide_no_text_that_shows_itself(values: list[Any], path: str) -> None:
    chooser = DialectChooser(path)
    told = read(chooser, values)
    assert (chooser.name, chooser.reading) == (None, Reading.INFERRED)
    assert "".join(delta.text for _, delta in told) == "".join(WORDS)


def test_events_of_koboldcpp_have_a_name() -> None:
    named = [SseEvent(0, 9, json.dumps({"token": w}).encode(), b"message") for w in WORDS]
    for values, reading in ((named, "koboldcpp"), ([{"token": w} for w in WORDS], None)):
        chooser = DialectChooser("/x")
        told = read(chooser, values)
        assert (chooser.name, "".join(delta.text for _, delta in told)) == (reading, "".join(WORDS))


def test_only_a_name_or_its_path_makes_the_end_of_a_table_certain() -> None:
    """`event: token` with a text in `data` is a form of many APIs, each with an end of its own."""
    line = [SseEvent(0, 9, json.dumps({"data": w}).encode(), b"token") for w in WORDS]
    for path, values, certain in (
        ("/x", line, False),
        ("/api/v1/prediction/7", line, True),
        ("/x", [{"event": "token", "data": w} for w in WORDS], True),
    ):
        chooser = DialectChooser(path)
        read(chooser, values)
        assert (chooser.name, chooser.end_certain) == ("flowise", certain)


class _Inferred:
    name = None
    knows_output = True

    def read_event(self, event: SseEvent) -> Delta:
        value = json.loads(event.data or b"{}")
        return Delta(EventClass.CONTENT, output=True, content=True, text=value["say"], choices=(0,))

    def read_body(self, body: bytes) -> Delta:
        return self.read_event(SseEvent(0, len(body), body))


def test_events_of_no_dialect_are_read_by_the_inferred_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.structure, "infer", lambda events, *, whole: _Inferred())
    chooser = DialectChooser("/x")
    told = read(chooser, [{"say": str(i)} for i in range(30)])
    assert [t_ns for t_ns, _ in told] == list(range(30))
    assert "".join(delta.text for _, delta in told) == "".join(map(str, range(30)))
    assert (chooser.name, chooser.reading) == (None, Reading.INFERRED)
    chooser = DialectChooser("/x")
    assert chooser.read_body(b'{"say": "a"}').text == "a"
    assert chooser.reading is Reading.INFERRED


def test_paths_of_a_users_table_choose_among_tables_and_exclude_no_answer() -> None:
    """`docs/howto/unknown-api.md` says what `paths` does."""

    def table(name: str, **more: Any) -> DialectTable:
        rule = {"event": "say", "content": "word"}
        return decode_table({"name": name, "source": "invented", "end": "none", "rules": [rule], **more})

    def name(path: str, events: list[Any], *tables: DialectTable) -> str | None:
        chooser = DialectChooser(path, Dialects(tables))
        read(chooser, events)
        return chooser.name

    with_path, without = table("with.path", paths="/say"), table("without")
    say = {"type": "say", "word": "The"}
    assert name("/other", [say], with_path) == "with.path"
    assert name("/say", [say], without, with_path) == "with.path"
    assert name("/other", [say], without, with_path) == "without"
    assert name("/other", [say], with_path, without) == "with.path"
    for events in ([{"error": {"message": "m"}}], [b"[DONE]"]):
        assert name("/say", events, with_path) == "with.path"
        assert name("/other", events, with_path) is None
    chooser = DialectChooser(CHAT, Dialects([with_path]))
    assert [bool(chooser.offer(event(say), 10, 0)) for _ in range(2)] == [False, True]


def test_every_event_is_released_once_in_its_order() -> None:
    rng = random.Random(7)
    forms: list[Any] = [
        {"type": "status", "message": "Loading"},
        {"bit": " on"},
        {"response": " on"},
        {"token": {"text": " on"}},
        {"error": {"message": "m"}},
        {"type": "ping"},
        {"text": "a" * 9_000},
        chunk(" on"),
        SseEvent(0, 2, None, None, True),
        SseEvent(0, 20_000, b"{}", b"ping"),
        b"[DONE]",
        b"{broken",
    ]
    for path in ("/x", CHAT) * 100:
        chosen = rng.sample(forms, rng.randrange(1, 5))
        values = [rng.choice(chosen) for _ in range(rng.randrange(400))]
        chooser = DialectChooser(path)
        told = read(chooser, values)
        assert [t_ns for t_ns, _ in told] == list(range(len(values)))
        assert chooser.kept_bytes == 0
        first = next((t_ns for t_ns, delta in told if delta.output), None)
        assert chooser.early_ns is None or (first is None or chooser.early_ns < first)


@pytest.mark.parametrize("path", ["/x", "/internal/llm"])
def test_the_form_of_chat_is_enough_even_if_all_texts_are_equal(path: str) -> None:
    """A server of tests sends the same word again and again, and names neither API nor model."""
    chooser = DialectChooser(path)
    word = {"choices": [{"index": 0, "delta": {"content": "word "}}]}
    outputs = [r.delta.output for i in range(3) for r in chooser.offer(event(word), 1, i)]
    assert (outputs, chooser.open, chooser.name) == ([True] * len(outputs), False, "openai.chat")
