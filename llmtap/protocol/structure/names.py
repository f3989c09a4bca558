"""Vocabulary of names: what the name of a member, event or type shows about its value.

Names are compared by their words: `outputText`, `output_text` and `output-text` are the same name.
"""

import re
from functools import lru_cache
from typing import Final, NamedTuple

NAME_CHARS_MAX: Final = 64
"""Maximum length of a name; the rest of a longer one is ignored."""
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


_NOT_IN_PATHS: Final = frozenset(".[]=!\"'\\\n*")


class Meaning(NamedTuple):
    """Meaning of the name of a member."""

    words: tuple[str, ...]
    """Words of the name, in lower case."""
    phrase: str
    """The words with spaces between them."""
    is_plain: bool
    """Whether the name can stand in a path of a table."""
    is_mark: bool
    """Whether the value of the member names the kind of its object."""
    is_reasoning_flag: bool
    """Whether `true` under this name marks a text as thinking."""
    is_partial_flag: bool
    """Whether the name says that the text is not complete."""
    is_end_flag: bool
    """Whether `true` under this name marks the end of the answer."""
    is_reason: bool
    """Whether the value of the member is a finish reason."""
    is_model: bool
    """Whether the value under this name can be the model."""


@lru_cache(maxsize=4_096)
def _cached_meaning(name: str) -> Meaning:
    words = tuple(word.lower() for word in _WORD.findall(name))
    phrase = " ".join(words)
    return Meaning(
        words,
        phrase,
        0 < len(name) <= NAME_CHARS_MAX and _NOT_IN_PATHS.isdisjoint(name),
        phrase in MARKS,
        phrase in REASONING_FLAGS,
        phrase in PARTIAL_FLAGS,
        phrase in END_FLAGS,
        not REASON_WORDS.isdisjoint(words) and (words[-1] == "reason" or phrase in ("finish", "stop")),
        phrase in MODELS,
    )


def meaning_of(name: str) -> Meaning:
    return _cached_meaning(name[: NAME_CHARS_MAX + 1])


def words(name: str) -> tuple[str, ...]:
    """Return the words of a name, in lower case."""
    return _cached_meaning(name[: NAME_CHARS_MAX + 1]).words


def _names(text: str) -> frozenset[str]:
    """Return the set of names in a text that separates them by commas."""
    return frozenset(" ".join(name.split()) for name in text.split(","))


MARKS: Final = _names("""
    type, event, object, kind, op, operation, event type, event name, message type, msg type, channel,
    section, phase, stage, topic, method, subtype, content type, chunk type, mode, action, ev, evt, cmd,
    session update
""")
"""Members whose value names the kind of their object."""
REASONING_FLAGS: Final = _names("""
    thought, is thought, thinking, is thinking, reasoning, is reasoning, thoughts
""")
"""Members that, if true, mark the text in the same object as reasoning."""

STRONG: Final = _names("""
    token, generated text, output text, text output, completion, answer, delta, text delta, content delta,
    delta text, delta content, partial json, reasoning content, reasoning text, thinking, reasoning, tool
    plan, generation, arguments delta, input delta, input text delta, token text, new text, text chunk, chunk
    text, completion text, response text, answer text, message delta, message chunk, delta message, content
    chunk, refusal, response delta, partial text, output delta, answer delta, answer chunk, token str, reply,
    partial, incremental text
""")
"""Members that hold generated text in almost all APIs that have such a member."""
USUAL: Final = _names("""
    text, content, response, output, chunk, fragment, piece, arguments, transcript, markdown, message content,
    thought, thoughts, part, parts, tokens, args, snippet delta, utterance, assistant, assistant message,
    assistant response, full text, text so far, accumulated, translation, generated, story, summary text, md,
    result text, args delta, segment, outputs, texts, say
""")
"""Members that often hold generated text, but often also other text."""
POSSIBLE: Final = _names("""
    message, data, value, v, d, c, m, s, body, result, string, str, word, words, msg, out, payload, html, p,
    bytes text, sentence, paragraph, line, input, summary, append, add, t, char, chars, items, a, r, x, txt,
    tok, w, bit, speech, caption, subtitle, utf8
""")
NEVER: Final = _names("""
    id, ids, uuid, guid, model, role, status, state, type, object, event, created, updated, timestamp, time,
    ts, date, url, uri, href, link, hash, checksum, digest, etag, fingerprint, signature, version, language,
    lang, locale, level, logger, severity, reason, code, error, errors, mime, format, encoding, audio, image,
    video, b64, base64, encrypted, obfuscation, padding, nonce, title, name, author, user, username, email,
    host, hostname, region, server, provider, vendor, file, filename, path, log, logs, stdout, stderr, trace,
    traceback, stack, warning, warnings, notice, debug, description, detail, details, label, labels, tag,
    tags, category, query, prompt, question, instructions, system, cursor, key, secret, currency, unit, units,
    source, sources, citation, citations, document, documents, passage, reference, references, annotation,
    annotations, embedding, score, metadata, meta, config, tool, tools, schema, stop, bytes, logprobs, step,
    node, run, thread, session, request, span, parent, progress, eta, duration, size, ip, address, phone,
    country, city, device, agent, voice, draft, selection, speaker, priority, queue, seq, index, original,
    echo, transport, protocol, kind, op, action, method, phase, stage, channel, topic, section, subtype,
    quantization, dtype, shape, owner, permission, tier, hint, help, tip, observation, cited, quote, verdict,
    safety, moderation, rating, probability, blocklist, policy
""")
"""Words in the name of a member that show that its text is not output of the model."""
ABOVE_NEVER: Final = _names("""
    error, errors, logprobs, document, documents, results, hits, matches, citation, citations, sources,
    source, references, annotations, prompt, request, query, embedding, embeddings, data uri, metadata, log,
    logs, debug, trace, warning, warnings, usage, timings, obfuscation, image, audio, video, search,
    moderation, safety, stderr, stdout, signature, retrieval, passages, headers, config, compaction, history,
    inputs, params, parameters, schema, session, instructions, user, author, sender, file, files, choices
    logprobs, grounding, web, alert, incident, job, task status, device, sensor, labels
""")
"""Words in the name of an object or array that show that no text inside it is output of the model."""
ABOVE_STRONG: Final = frozenset({"delta", "choices", "candidates", "generations", "completions"})
ABOVE_USUAL: Final = _names("""
    generation, completion, chunk, answer, parts, message, messages, output, outputs, token, content, reply,
    predictions, response, block, part, replies
""")
"""Words that the names of objects and arrays with generated text often have."""
ABOVE_DOUBTFUL: Final = frozenset({"result", "results"})
STORED: Final = _names("""
    table, collection, coll, database, db, row, record, column, columns, rev, revision, doc, docs, lsn,
    before, after, old, sql, retain
""")
"""Words in the names of members that show a stored text, which grows while a person writes it: a row of a
database, or a document."""
KIND_STRONG: Final = _names("""
    delta, chunk, token, tokens, generation, partial, reasoning, thinking, thought, fragment, piece,
    completion, think, append, refusal
""")
"""Words in the name or type of an event that show that the event adds text."""
KIND_USUAL: Final = _names("""
    text, content, answer, word, assistant, transcript, reply, speak, say, output, final, response
""")
"""Words in the name or type of an event that are usual if the event adds text, but do not prove it."""
KIND_NEVER: Final = _names("""
    done, end, ended, completed, complete, finish, finished, stop, stopped, closed, error, failed, failure,
    exception, status, progress, log, logs, info, warning, warn, debug, notice, ping, pong, heartbeat,
    keepalive, usage, metadata, meta, citation, citations, source, sources, result, results, title, signature,
    image, audio, video, retrieval, search, document, documents, embedding, telemetry, metric, metrics, trace,
    span, queue, queued, hello, ready, ack, presence, typing, notification, alert, session, connected,
    disconnected, subscribe, subscribed, snapshot, compaction, moderation, guardrail, safety, echo, put,
    autosave, saved, user, human, system, observation, download, upload, pull, build, deploy, job, health,
    draft, billing, quota, rate, route, routing, cache, retry, suggestion, suggestions, followup, annotation,
    references, stdout, stderr, stt, asr, heart, tick, sensor, reading, measurement, price, trade, quote,
    order, edit, file, files, config, obfuscation, fallback, memory
""")
"""Words in the name or type of an event that show that the event adds no text, or repeats text."""
BESIDE_NEVER: Final = _names("""
    level, severity, logger, progress, percent, percentage, eta, pid, hostname, similarity, relevance, score,
    url, author, username, user, sender, email, priority, alert, ip, sensor, unit, channel id, guild,
    attendee, participant, suggest, price, currency, headline, likes, timestamp, attempt, exit, elapsed,
    stage, service
""")
"""Words in the names of members beside a text that show that the text is a log line, notice or document."""
SPAN: Final = frozenset({"start", "end"})
"""Names of members beside a text that show that the text is a part of a known text."""
ANNOTATIONS: Final = frozenset({"offset", "weight", "accepted", "rank"})
"""Names of members beside a text that show that the text was known before, and is only annotated."""
REASONING: Final = _names("""
    reasoning, thinking, think, thought, thoughts, cot, scratchpad, analysis, plan, reflection
""")
CALL: Final = _names("""
    tool, tools, function, functions, arguments, args, call, calls, command, diff, code
""")
CALL_NAMES: Final = (("name",), ("tool", "name"), ("function", "name"), ("tool", "call", "name"), ("tool",))
ARGUMENTS: Final = frozenset({"arguments", "args", "input", "partial json", "arguments delta", "input delta"})
CALLING: Final = frozenset({"call", "calls", "use", "uses", "calling"})
DEFINITION: Final = frozenset({"description", "parameters", "input schema", "schema"})
"""Members beside the name of a tool that show that the tool is offered, not called."""
CALL_RESULT: Final = frozenset(
    {"result", "results", "output", "outputs", "response", "responses", "observation", "return"}
)
_USERS: Final = frozenset({"user", "human", "customer", "caller"})
_TO_USERS: Final = frozenset({"to", "for", "facing", "visible"})
_RECOGNITION: Final = _names(
    "stt, asr, recognized, recognised, recognizing, recognition, dictation, inbound, incoming"
)
_TRANSCRIPT: Final = frozenset({"transcript", "transcripts", "transcription", "transcriptions"})
_OF_SOUND: Final = frozenset({"input", "audio", "speech", "voice"})
_OF_MODEL: Final = frozenset({"output", "response", "assistant", "agent", "bot", "model", "answer", "reply"})

ENDS: Final = _names("""
    done, end, ended, completed, complete, finish, finished, stop, stopped, final, close, closed, eos, eof
""")
ERRORS: Final = frozenset({"error", "errors", "failed", "failure", "exception", "fault"})
PARTIAL_FLAGS: Final = _names("partial, is partial, interim, is interim, streaming, is streaming, incomplete")
"""Members that, if true, mark a piece of a text. The whole text can follow without this flag."""
END_FLAGS: Final = _names("""
    done, finished, finish, is final, is finished, is done, is end, is last, final, last, eos, complete,
    completed, stop, end, is complete, ended, eof, end of stream, is stop, finish flag, end turn
""")
REASON_WORDS: Final = frozenset({"finish", "stop", "end", "completion", "done", "termination", "ending"})
MODELS: Final = frozenset({"model", "model name", "model version", "model id"})
END_TEXTS: Final = frozenset(
    {"[done]", "[end]", "done", "end", "<end>", "[eof]", "eof", "[finish]", "[complete]", "<|end|>", "[stop]"}
)


def is_of_user(name: tuple[str, ...]) -> bool:
    """Return whether the words of a name show a text of the user: typed, or recognised from speech."""
    known = frozenset(name)
    if known & _USERS:
        return not known & _TO_USERS
    if known & _OF_MODEL:
        return False
    return name == ("in",) or bool(known & _RECOGNITION or (known & _TRANSCRIPT and known & _OF_SOUND))


_COUNT_WORDS: Final = frozenset(
    {"token", "tokens", "count", "n", "length", "len", "used", "num", "usage", "billed"}
)
_INPUT: Final = frozenset(
    {"prompt", "input", "in", "context", "evaluated", "query", "request", "sent", "read"}
)
_OUTPUT: Final = _names("""
    completion, output, out, generated, candidates, response, predicted, generation, answer, reply, produced,
    new, written, received
""")
_NO_COUNT: Final = _names("""
    max, limit, remaining, budget, rate, per, second, seconds, ms, time, latency, cost, price, ns, duration,
    min, audio, image, quota, reset, percent, size, bytes, chars, characters, index, details, accepted,
    rejected, prediction, creation, id, version, messages, requests, choices, text, video
""")
_HOLDERS: Final = frozenset({"usage", "tokens", "token", "billed", "consumption"})


@lru_cache(maxsize=4_096)
def count_of(path: tuple[str, ...]) -> str | None:
    """Return the kind of tokens that the integer at `path` counts, as its name shows; None if it counts none.

    The result is `input`, `output`, `reasoning`, `cached` or `total`. A short name such as `in` counts tokens
    only in an object with a name such as `usage`.
    """
    names = [words(name) for name in path if name != "[]"]
    if not names:
        return None
    own = frozenset(names[-1])
    above = frozenset(word for name in names[:-1] for word in name)
    if own & _NO_COUNT:
        return None
    tokens = bool(own & {"token", "tokens"}) or bool(above & _HOLDERS)
    if names[-1] == ("eval", "count"):
        return "output"
    if names[-1] == ("prompt", "eval", "count"):
        return "input"
    if not tokens or (not own & _COUNT_WORDS and not above & _HOLDERS):
        return None
    if own & {"cached", "cache"}:
        return "cached"
    if own & REASONING:
        return "reasoning"
    if own & {"total"} and not own & (_INPUT | _OUTPUT):
        return "total"
    if own & _INPUT and not own & _OUTPUT:
        return "input"
    if own & _OUTPUT:
        return "output"
    return None
