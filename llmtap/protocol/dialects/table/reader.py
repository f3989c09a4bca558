"""Read answers as Deltas with the table of a dialect.

`TableDialect` compiles a table once. Each answer has a `TableReader`, which finds the rule for an event, and
builds a Delta of the values that the rule finds.

Source: declaration.py.
"""

import re
from typing import Any, Final

from llmtap.json_types import JsonObject
from llmtap.protocol import verdicts
from llmtap.protocol.delta import Delta, EventClass, ServerTime, TokenSource, UsageCounts, Verdict
from llmtap.protocol.dialects import openai_shapes, shapes
from llmtap.protocol.dialects.openai_shapes import PIECES_MAX, read_count
from llmtap.protocol.dialects.table.declaration import (
    OUTPUTS,
    Counts,
    DialectTable,
    Rule,
    as_texts,
    count_paths,
    parse_path,
    rule_paths,
)
from llmtap.protocol.dialects.table.findings import NO_VALUE, Findings, TextsSoFar, Values
from llmtap.protocol.dialects.table.paths import follow_first, index_of
from llmtap.protocol.dialects.table.rules import OF_CHOICE, CompiledRule
from llmtap.protocol.dialects.table.samples import Sample, take_sample
from llmtap.protocol.server_times import duration_ms
from llmtap.protocol.speakers import SPEAKERS, MessageSpeakers, role_of
from llmtap.protocol.sse import SseEvent

_GUARDRAIL: Final = "amazon-bedrock-guardrailAction"
_NO_EVENT: Final = SseEvent(0, 0, b"")
_BESIDE_TEXT: Final = frozenset(("usage", "model", "role"))
SAMPLES_MAX: Final = 16
"""Maximum number of samples (`samples.py`) that are taken from one answer."""


class TableDialect:
    """A dialect that is a table. Calling it returns a reader for one answer."""

    def __init__(self, table: DialectTable) -> None:
        self.table = table
        self.name = table.name
        self.end_certain = table.end_certain
        """Whether every complete answer has an end mark."""
        paths_of = [as_texts(getattr(table.counts, key)) for key in Counts.__struct_fields__]
        plain = [bool(paths) and parse_path(paths[0]) == (paths[0],) for paths in paths_of]
        self.counts = [
            paths[0] if is_member else None for paths, is_member in zip(paths_of, plain, strict=True)
        ]
        """For each count: its member in the usage; None if its first path is not a single member."""
        others = (follow_first(paths[is_member:]) for paths, is_member in zip(paths_of, plain, strict=True))
        self.other_counts = [(i, get) for i, get in enumerate(others) if get is not None]
        """Paths of counts that differ from OpenAI's, with their order in the table."""
        self.count_paths = count_paths(table)
        """Paths of the token counts in the table."""
        ends = (".*".join(map(re.escape, end.split("*"))) for end in as_texts(table.paths))
        self._match_path = re.compile(f"({'|'.join(ends)})\\Z", re.DOTALL).search if table.paths else None
        """Matches the paths of requests that can have such answers."""
        self._name_of = follow_first(table.match)
        """Returns the name of an event from its JSON; None: the `event:` line names it."""
        self.message_id = follow_first(table.message)
        """Returns the id of the message to which an event belongs; None: there are no ids."""
        marks = (Rule(event=names, event_class=mark) for mark, names in table.events.items())
        rules = [CompiledRule(rule, table) for rule in (*table.rules, *marks)]
        self._other_rules = [
            (name[:-1], rule) for rule in rules for name in rule.names if name.endswith("*")
        ] + [("", rule) for rule in rules if not rule.names]
        """Rules with the prefix of names that they fit; "" for rules without names, which fit all names."""
        names = {name for rule in rules for name in rule.names if not name.endswith("*")} | {""}
        self._rules_by_name = {
            name: [*(rule for rule in rules if name in rule.names), *self._more_rules(name)] for name in names
        }
        """By name of an event: rules that can fit it."""
        paths = [path for rule in table.rules for _, path in rule_paths(rule)]
        paths += (*as_texts(table.match), *as_texts(table.model), *self.count_paths, *as_texts(table.message))
        starts = [step for path in paths for step in parse_path(path)[:1] if isinstance(step, str)]
        starts += (*as_texts(table.envelope), *(self._rules_by_name if table.wrapped else ()))
        self.names_read = frozenset(("type", "error", _GUARDRAIL, *SPEAKERS, *starts))
        """Names of the members at the top of an event that a reader reads."""

    def __call__(self) -> "TableReader":
        return TableReader(self)

    def claim(self, value: Any, path: str, name: bytes | None = None) -> int:
        """Return how certainly an event belongs to this dialect: 3 if its data has a name of an event, 2 if
        its members or the `event:` line fit, more if the path fits, too; 1 if only the path fits, else 0."""
        on_path = self._match_path is not None and self._match_path(path) is not None
        if type(value) is not dict and type(value) is not list:
            rule, _ = self.find_rule(None, name)
            is_text = self.table.plain_text and (on_path or self.open(None, name)[0])
            return 2 + on_path if is_text or (rule is not None and rule.reads_data) else 0
        own, inside = self.open(value, None, alone=True)
        # Names of errors, and of events without meaning, do not count: many dialects have the same.
        if any(
            own in rule.names and rule.fits(inside) and not rule.reads_error and (on_path or rule.has_meaning)
            for rule in self._rules_by_name.get(own, ())
        ):
            return 3 + on_path
        rule, _ = self.find_rule(value, name)
        if rule is not None and rule.has_evidence and (rule.has_conditions or self._reads_anything(value)):
            return 2 + 2 * on_path
        if type(value) is list:
            return self.claim(value[0], path) if rule is None and value and type(value[0]) is dict else 0
        return int(on_path and (rule is not None or "error" in value))

    def _reads_anything(self, root: Any) -> bool:
        """Return whether the table reads output, counts, a verdict or the end in an event."""
        rule, value = self.find_rule(root, None)
        if rule is None:
            return False
        reader = self()
        delta = reader._read(root, _NO_EVENT) if type(root) is dict else reader._read_with(rule, value)[1]
        return bool(delta.output or delta.done or delta.counts or delta.verdict or delta.finish_reason)

    def open(self, root: Any, event_name: bytes | None, *, alone: bool = False) -> tuple[str, Any]:
        """Return the name of an event, and the object in which the paths of its rule begin. `alone`: a member
        names the event only if the object has no other member."""
        table = self.table
        if table.envelope is not None and type(root) is dict and type(root.get(table.envelope)) is dict:
            root = root[table.envelope]
        name = None if self._name_of is None else self._name_of(root)
        if type(name) is int and type(root) is list:
            name = str(name)
        if type(name) is not str or not name:
            name = "" if event_name is None else event_name.decode("latin-1")
            # WHATWG HTML: an event without an `event:` line has the name `message`.
            if name in ("", "message") and table.wrapped and type(root) is dict:
                name, root = self._unwrap(name, root, alone=alone)
        return name, root

    def _unwrap(self, name: str, root: dict[str, Any], *, alone: bool) -> tuple[str, Any]:
        """Return the name and the value of the first member that names an event; else `name` and `root`."""
        if len(root) == 1 or not alone:
            member = next((key for key in root if key and key in self._rules_by_name), None)
            if member is not None:
                return member, root[member] if type(root[member]) is dict else root
        return name, root

    def _more_rules(self, name: str) -> list[CompiledRule]:
        """Return the rules whose event name ends with `*` and fits."""
        return [rule for start, rule in self._other_rules if name.startswith(start)]

    def find_rule(self, root: Any, event_name: bytes | None) -> tuple[CompiledRule | None, Any]:
        """Return the rule that fits an event (or None), and the object in which its paths begin."""
        name, root = self.open(root, event_name)
        rules = self._rules_by_name.get(name)
        for rule in self._more_rules(name) if rules is None else rules:
            if rule.fits(root):
                return rule, root
        return None, root


class TableReader(shapes.ObjectReader):
    """Reader of one answer by the table of its dialect."""

    __slots__ = (
        "_dialect",
        "_has_answer",
        "_has_output",
        "_lists_tokens",
        "_messages",
        "_running_count",
        "_sample",
        "_samples_left",
        "_streamed",
        "_texts_so_far",
        "names_read",
    )

    def __init__(self, dialect: TableDialect) -> None:
        super().__init__()
        self._dialect = dialect
        self.names_read = dialect.names_read
        self._has_output = False
        self._streamed = False
        """Whether a rule without `repeats` has read output, so that rules with `repeats` read none."""
        self._has_answer = False
        """Whether an event has had output other than reasoning."""
        self._lists_tokens = False
        """Whether events list their tokens: then ignore the running count, which ends one too high."""
        self._running_count = openai_shapes.RunningCount()
        self._messages = MessageSpeakers()
        self._sample: Sample | None = None
        """Event of which similar events differ only in their text, so are read fast."""
        self._samples_left = SAMPLES_MAX
        """How many samples may still be made."""
        self._texts_so_far = TextsSoFar()

    @property
    def name(self) -> str | None:
        return self._dialect.name

    @property
    def end_certain(self) -> bool:
        return self._dialect.end_certain

    def read_event(self, event: SseEvent) -> Delta:
        """Return the Delta of an event by the rule that fits it. Its data is an object, a list or a text."""
        data = event.data
        if data is None:
            return openai_shapes.read_non_object(event)
        if data.startswith(b"{") or openai_shapes.is_object(data):
            root = openai_shapes.read_json(data)
            return self._read(root, event) if type(root) is dict else openai_shapes.unknown_delta(event.event)
        value = openai_shapes.read_data(data)
        is_end = data.strip() == b"[DONE]"
        kind = self._dialect.table.plain_text
        rule, _ = self._dialect.find_rule(value, event.event)
        if rule is not None and (isinstance(value, list) or rule.names):
            # Read data that is no object if the `event:` line names the event: `event: end`, `data: null`.
            reads = not is_end if rule.reads_data else kind is None or not rule.has_evidence
            if reads or isinstance(value, list):
                return self._read_with(rule, value)[1]
        if kind is not None and not is_end and isinstance(value, str):
            return shapes.piece(OUTPUTS[kind], value) if value else Delta(EventClass.METADATA)
        return openai_shapes.read_non_object(event)

    def _read(self, root: JsonObject, event: SseEvent) -> Delta:
        sample = self._sample
        if sample is not None and sample.event_name == event.event and (text := sample.take_text(root)):
            delta = shapes.piece(sample.kind, text, sample.choices)
            delta.repeatable = True
            if (
                sample.usage_member is not None
                and (usage := self._read_usage(root.get(sample.usage_member), root)) is not None
            ):
                delta.repeatable = False
                shapes.add_counts(delta, *usage[:2])
                delta.usage_running = self._running_count.has_several_choices
            return delta
        rule, value = self._dialect.find_rule(root, event.event)
        if rule is None or (not rule.reads_error and (root.get("error") or event.event == b"error")):
            name, _ = self._dialect.open(root, event.event)
            return shapes.failure_in(root, name.encode() if name in ("error", "ping") else event.event)
        findings, delta = self._read_with(rule, value)
        if findings.is_text and rule.repeatable and _GUARDRAIL not in root:
            delta.repeatable = delta.counts is None
            if self._samples_left and (delta.counts is None or rule.usage_member is not None):
                sample = take_sample(delta, root, event, self.names_read, rule.usage_member)
                if sample is not None:
                    self._sample = sample
                    self._samples_left -= 1
        return delta

    def _read_with(self, rule: CompiledRule, root: Any) -> tuple[Findings, Delta]:
        """Read an event with the rule that fits it."""
        findings = Findings(self._texts_so_far)
        if self._dialect.message_id is not None and type(root) is dict:
            role = role_of(root) if rule.role is None else rule.role(root)
            if self._messages.has_other_speaker(self._dialect.message_id(root), role):
                return findings, Delta(EventClass.METADATA)
        self._add_event(rule, root, findings, 0)
        delta = self._to_delta(findings)
        self._streamed = self._streamed or (delta.output and not rule.repeats)
        return findings, delta

    def read_body(self, body: bytes) -> Delta:
        value = openai_shapes.read_json(body)
        if isinstance(value, dict):
            return self._read(value, _NO_EVENT)
        findings = Findings(self._texts_so_far)
        understood, roots = 0, shapes.answers(value)
        separate = self._dialect.table.array == "answers"
        for position, root in enumerate(roots):
            rule, root = self._dialect.find_rule(root, None)
            if rule is not None and (rule.reads_error or not root.get("error")):
                understood += 1
                model = findings.values.get("model")
                findings.values = {} if model is None else {"model": model}
                findings.choice_values, findings.ends = {}, 0
                self._add_event(rule, root, findings, position if separate else 0)
        if 2 * understood > len(roots):
            return self._to_delta(findings)
        return shapes.failure_in(value)

    def _add_event(self, rule: CompiledRule, root: Any, findings: Findings, position: int) -> None:
        """Add the content of an event. `position`: index of its choice if the event has no index."""
        if rule.choice_index is not None:
            position = index_of(rule.choice_index(root), position)
        findings.root = root
        rule.visit(root, findings, position)
        if rule.repeats and self._streamed:
            findings.pieces, findings.choices, findings.reads_tokens = [], {}, False
        if len(findings.pieces) > PIECES_MAX:
            findings.cut = True
            del findings.pieces[PIECES_MAX:]
        # If the event has output, its class is that of the output, so METADATA and TOOL_CALL are not added.
        if rule.mark is not None and not (
            findings.pieces and rule.mark in (EventClass.METADATA, EventClass.TOOL_CALL)
        ):
            findings.beside.append(rule.mark)
        if findings.ends and findings.ends == rule.end_count:
            findings.beside.append(EventClass.DONE)
        if findings.choice_values:
            findings.signal = rule.signal
            for index, values in findings.choice_values.items():
                self._read_choice(index, values, findings)
        if findings.values:
            self._read_values(rule, findings)

    def _read_values(self, rule: CompiledRule, findings: Findings) -> None:
        """Add the values of the whole event: usage, error and durations."""
        values = findings.values
        usage = values["usage"][1] if "usage" in values else findings.root if "count" in values else None
        if (read := self._read_usage(usage, findings.root)) is not None:
            counts, findings.usage, findings.total = read
            findings.counts.append(counts)
        if "error" in values and (error := values["error"][1]):
            findings.error = error
            findings.beside.append(EventClass.ERROR)
            findings.store_verdict(verdicts.error_verdict({"error": error}))
        for name, path, unit in rule.times:
            ms = duration_ms(values.get(f"times.{name}", NO_VALUE)[1], unit)
            if ms is not None:
                findings.times += (ServerTime(name, ms, path.rpartition(".")[0] or path, path, unit),)

    def _read_usage(self, usage: Any, root: Any) -> tuple[UsageCounts, JsonObject, Any] | None:
        """Return the counts of a usage object, the object, and its total; None if it counts no tokens."""
        if type(usage) is not dict:
            return None
        # Most counts are direct members of the usage. map() reads them without calls of Python functions.
        numbers = list(map(usage.get, self._dialect.counts))
        for i, other in self._dialect.other_counts:
            if numbers[i] is None and (number := other(usage)) is not None:
                numbers[i] = len(number) if type(number) is list else number
        total = numbers.pop()
        counts = shapes.counts_of(*numbers)
        if counts is None:
            return None
        if usage is root:
            usage = {key: usage[key] for key in self._dialect.count_paths if usage.get(key) is not None}
        return counts, usage, total

    def _read_choice(self, index: int, values: Values, findings: Findings) -> None:
        """Add the finish reason of a choice, and its tokens: in this event, or the growth of a running
        count."""
        reason, tokens, logprobs, running = (values.get(key, NO_VALUE)[1] for key in OF_CHOICE)
        reason = shapes.text_of(reason)
        if reason.lower() in openai_shapes.NOT_ENDED:
            reason = ""
        if reason:
            if findings.reason is not None:  # Another choice of this event has ended, too.
                findings.store_verdict(verdicts.finish_reason_verdict(findings.reason, findings.signal))
            findings.reason = reason
        added, source = _element_count(tokens), TokenSource.TOKEN_IDS
        if not added:
            added, source = _element_count(logprobs), TokenSource.LOGPROBS
        self._lists_tokens = self._lists_tokens or added > 0
        if (total := read_count(running)) is not None:
            # Count the first value of a running count for this event only if the event has a text and does
            # not end the choice. An empty text is enough, because a token can be only a part of a character.
            runs = self._running_count.has_count(index) and not self._lists_tokens
            runs = runs or (findings.texts > 0 and not reason)
            step = self._running_count.growth(index, total)
            if runs and not added:
                added, source = step, TokenSource.RUNNING_USAGE
        if added and findings.reads_tokens:
            findings.tokens += added
            findings.source = source
            findings.choices[index] = None

    def _to_delta(self, findings: Findings) -> Delta:
        """Return the Delta of all findings."""
        pieces, counts = findings.pieces, findings.counts[-1] if findings.counts else None
        if len(findings.counts) > 1 and self._dialect.table.array == "answers":
            counts = openai_shapes.sum_counts(findings.counts)
        if (
            len(pieces) == 1
            and not (findings.beside or findings.verdict or findings.reason)
            and pieces[0][0] is not EventClass.REFUSAL
        ):
            delta = shapes.piece(*pieces[0], tuple(findings.choices), audio=not pieces[0][1])
            shapes.add_counts(delta, counts, findings.usage)
            beside = findings.tokens or findings.choice_values or findings.values.keys() - _BESIDE_TEXT
            findings.is_text = bool(delta.text) and not beside
        else:
            delta = self._whole_delta(findings, counts)
        if findings.tokens:
            delta.tokens, delta.token_source = findings.tokens, findings.source
            delta.output, delta.choices = True, tuple(findings.choices)
        if delta.output:
            self._has_output = True
            self._has_answer = self._has_answer or delta.content or delta.blank or delta.tool_call
        if counts is not None:
            delta.usage_running = self._running_count.has_several_choices
            # If input and reasoning tokens add up to the total, there were no output tokens.
            silent = counts.reasoning and (counts.input or 0) + counts.reasoning == read_count(findings.total)
            if findings.reason is not None and not self._has_answer and counts.output is None and silent:
                counts.output = 0
        delta.server_times = findings.times
        delta.parsed = not findings.cut
        model = findings.values.get("model", NO_VALUE)[1]
        if model is not None and model != self._model:
            self._set_model(delta, model)
        return delta

    def _whole_delta(self, findings: Findings, counts: UsageCounts | None) -> Delta:
        """Return the Delta of an event that is more than one piece of output."""
        reason, beside, pieces = findings.reason, findings.beside, findings.pieces
        meaning = None if reason is None else self._dialect.table.finish_reasons.get(reason)
        if meaning is not None and reason is not None:
            findings.store_verdict(_verdict_of(meaning, reason, findings.signal))
            beside += [EventClass.ERROR] if meaning == "failed" else []
        if any(kind is EventClass.REFUSAL for kind, _ in pieces):
            findings.store_verdict(verdicts.refusal_verdict("content.refusal"))
        verdict = findings.verdict
        if verdict is not None and verdict.kind == verdicts.MODEL_REFUSAL:
            beside.append(EventClass.REFUSAL)
        acts = verdict is not None and verdict.kind in (verdicts.INPUT, verdicts.OUTPUT)
        has_output = self._has_output or pieces or reason or (counts and counts.output)
        if "role" in findings.values and not has_output:
            beside.append(EventClass.ROLE)
        delta = shapes.gather(
            pieces,
            beside,
            choices=tuple(findings.choices) or shapes.CHOICE_0,
            reason=reason if meaning is None else None,
            signal=findings.signal,
            verdict=verdict if acts else None,
            counts=counts,
            usage=findings.usage,
        )
        if delta.event_class is EventClass.USAGE and EventClass.METADATA in beside:
            delta.event_class, delta.also = EventClass.METADATA, (EventClass.USAGE,)
        elif EventClass.METADATA in delta.also:
            delta.also = tuple(c for c in delta.also if c is not EventClass.METADATA)
        delta.finish_reason, delta.verdict = reason, delta.verdict or verdict
        delta.done = EventClass.DONE in beside
        if findings.error is not None:
            openai_shapes.add_error(delta, findings.error)
            if reason is not None and isinstance(findings.error, str):
                delta.error_type = reason
        elif EventClass.ERROR in beside:
            delta.error_type = reason or "error"
        return delta


def _element_count(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1 if isinstance(value, dict) else read_count(value) or 0


def _verdict_of(meaning: str, reason: str, signal: str) -> Verdict | None:
    """Return the verdict of a finish reason with this meaning."""
    if meaning == "refusal":
        return Verdict(signal, verdicts.MODEL_REFUSAL, value=reason)
    if meaning in (verdicts.INPUT, verdicts.OUTPUT):
        return Verdict(signal, meaning, "blocked", meaning.partition("_")[0], value=reason)
    return None
