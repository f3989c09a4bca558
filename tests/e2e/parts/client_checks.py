"""What the clients saw, held against what `llmtap sim serve` says it did, and the table of it.

The checks, as the table's last column names them:

    text    what all clients and APIs get for this prompt and seed, or its beginning
    count   as many tokens as the truth sent; so says the client's usage, and Hugging Face's `tokenizers`
    pieces  as many as events were sent, none handed over before its token was sent
    end     how it ended, for the client and in the truth
    raised  the client raised an exception of its own, after what had come until then
    tries   as many requests as expected, none before Retry-After
    types   each object fits the client's own types, or for curl: framing and last event are whole
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from parts.client_plan import RETRY_AFTER_S

Json = dict[str, Any]
TIMER_S = 0.01  # timers of Node count in whole milliseconds, and are early by one at times
WORDS = ("text", "count", "pieces", "end", "raised", "tries", "types")


@dataclass(slots=True)
class Seen:
    """One ask, what its client recorded, and the truth of each of its requests in the order they came."""

    client: str
    ask: Json
    record: Json
    truths: list[Json]
    prompt_counted: int
    """Tokens of the prompt, by `tokenizers`."""
    counted: list[int]
    """Tokens of each text, by `tokenizers`."""

    @property
    def truth(self) -> Json:
        return self.truths[-1]

    @property
    def said(self) -> list[str]:
        return said_in(self.record)


def said_in(record: Json) -> list[str]:
    """By choice, what was said, or by what it was refused."""
    return [a or b for a, b in zip(record["texts"], record["refusals"], strict=True)]


@dataclass(slots=True)
class Row:
    """A line of the table."""

    client: str
    name: str
    asks: int = 0
    requests: int = 0
    checked: set[str] = field(default_factory=set)
    raised: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    ttft_ns: list[int] = field(default_factory=list)
    """From just before the client's call to its first piece, of streams."""
    ttft_true_ns: list[int] = field(default_factory=list)
    """From the request's acceptance to its first token sent, of the same streams."""
    later_ns: list[int] = field(default_factory=list)
    """From each token sent to its piece handed over."""

    def as_json(self) -> Json:
        return {
            "client": self.client,
            "asked": self.name,
            "asks": self.asks,
            "requests": self.requests,
            "checked": [word for word in WORDS if word in self.checked],
            "raised": sorted(self.raised),
            "wrong": self.wrong,
            "ttft_ms": ms(median(self.ttft_ns)),
            "ttft_true_ms": ms(median(self.ttft_true_ns)),
            "later_ms": ms(median(self.later_ns)),
            "later_ms_max": ms(max(self.later_ns, default=None)),
        }


def median(values: list[int]) -> int | None:
    """The lower one, of an even number."""
    return sorted(values)[(len(values) - 1) // 2] if values else None


def ms(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 2)


# ---------------------------------------------------------------- the checks of one ask


def check_tries(seen: Seen) -> Iterator[str]:
    wanted, truths = seen.ask["expected"]["attempts"], seen.truths
    if wanted is not None and len(truths) != wanted:
        yield f"the server had {len(truths)} requests, not {wanted}"
    for before, after in pairwise(truths):
        waited_s = (after["accepted_ns"] - before["ended_ns"]) / 1e9
        if waited_s < RETRY_AFTER_S - TIMER_S:
            yield f"tried again after {waited_s:.3f} s, told to wait {RETRY_AFTER_S} s"


def check_raised(seen: Seen) -> Iterator[str]:
    error, names = seen.record["error"], seen.ask["expected"]["raises"]
    if error is None and names:
        yield f"nothing was raised, not {' or '.join(names)}"
    elif error is not None and error[0].rpartition(".")[2] not in names:
        yield f"raised {error[0]}, not {' or '.join(names) or 'nothing'}: {error[2]}"


def check_end(seen: Seen) -> Iterator[str]:
    wanted = seen.ask["expected"]
    if seen.truths and seen.truth["outcome"] != wanted["outcome"]:
        yield f"the truth is {seen.truth['outcome']}, not {wanted['outcome']}"
    if wanted["finish"] is not None and seen.record["finish"] != wanted["finish"]:
        yield f"finished with {seen.record['finish']}, not {wanted['finish']}"
    if seen.truths and seen.truth["stream"] != seen.ask["stream"]:
        yield f"the server was asked for {'a stream' if seen.truth['stream'] else 'a whole answer'}"


def check_count(seen: Seen) -> Iterator[str]:
    wanted, usage, truth = seen.ask["expected"], seen.record["usage"], seen.truth
    sent = [len(stamps) for stamps in truth["sent_ns"]]
    if wanted["tokens"] is not None and sent != wanted["tokens"]:
        yield f"the server sent {sent} tokens, not {wanted['tokens']}"
    # A stop string is generated and counted, and not said.
    if "stop" not in seen.ask and seen.counted != sent:
        yield f"the texts have {seen.counted} tokens, sent were {sent}"
    if truth["prompt_tokens"] != seen.prompt_counted:
        yield f"the prompt has {seen.prompt_counted} tokens, the server counted {truth['prompt_tokens']}"
    if usage is not None and usage != [truth["prompt_tokens"], sum(sent)]:
        yield f"usage is {usage}, the truth {[truth['prompt_tokens'], sum(sent)]}"
    if usage is None and (seen.ask.get("usage") or not seen.ask["stream"]) and seen.record["error"] is None:
        yield "no usage came"


def check_pieces(seen: Seen) -> Iterator[str]:
    wanted = seen.ask["expected"]["pieces"]
    for arrived, sent in zip(seen.record["arrivals_ns"], seen.truth["sent_ns"], strict=True):
        if wanted is not None and len(arrived) != wanted:
            yield f"{len(arrived)} pieces came, {wanted} were sent"
        # The piece at place i holds token i or a later one, so this is never stricter than it may be.
        if early := [a - s for a, s in zip(arrived, sent, strict=False) if a < s]:
            yield f"{len(early)} pieces came before their tokens were sent, by up to {ms(-min(early))} ms"


def check_text(seen: Seen, texts: dict[Any, str]) -> Iterator[str]:
    for i, said in enumerate(seen.said):
        whole = texts.get((*key_of(seen), i))
        if whole is None:
            yield f"nobody was told all of the text of choice {i}"
        elif not whole.startswith(said):
            yield f"choice {i} says {said[:60]!r}..., others were told {whole[:60]!r}..."
        elif (stop := seen.ask.get("stop")) and said != whole.partition(stop[0])[0]:
            yield f"choice {i} does not end before {stop[0]!r}: {said!r}"


def key_of(seen: Seen) -> tuple[Any, ...]:
    refused = seen.ask.get("headers", {}).get("x-sim-refusal") in ("text", "field")
    return ("refusal",) if refused else (seen.ask["prompt"], seen.ask.get("seed"))


def texts_of(all_seen: list[Seen]) -> dict[Any, str]:
    """By prompt, seed and choice: the longest text that anyone was told."""
    texts: dict[Any, str] = defaultdict(str)
    for seen in all_seen:
        for i, said in enumerate(seen.said):
            key = (*key_of(seen), i)
            texts[key] = max(texts[key], said, key=len)
    return texts


# ---------------------------------------------------------------- all of them


def complaints(seen: Seen, texts: dict[Any, str]) -> Iterator[tuple[str, list[str]]]:
    """The name of each check that applies, and what it found wrong."""
    yield "tries", list(check_tries(seen))
    yield "raised", list(check_raised(seen))
    if seen.ask["call"] == "models":
        yield "text", [] if seen.said == [seen.ask["model"]] else [f"models are {seen.said}"]
    if seen.record["misshapen"] is not None or seen.client in ("curl", "openai, Python"):
        yield "types", list(filter(None, [seen.record["misshapen"]]))
    if not seen.truths:
        return
    yield "end", list(check_end(seen))
    if seen.truth["status"] == 200:
        yield "count", list(check_count(seen))
        yield "pieces", list(check_pieces(seen))
        yield "text", list(check_text(seen, texts))


def check(all_seen: list[Seen]) -> list[Row]:
    """The table's rows, with what is wrong in each."""
    rows: dict[tuple[str, str], Row] = {}
    texts = texts_of(all_seen)
    for seen in all_seen:
        row = rows.setdefault((seen.client, seen.ask["row"]), Row(seen.client, seen.ask["row"]))
        row.asks += 1
        row.requests += len(seen.truths)
        row.raised |= {seen.record["error"][0]} if seen.record["error"] else set()
        for word, wrong in complaints(seen, texts):
            # What went as ever needs no column: that nothing was raised, and that one try was enough.
            if word not in ("tries", "raised") or seen.record["error"] or len(seen.truths) > 1:
                row.checked.add(word)
            row.wrong += [f"{seen.ask['id']}: {word}: {sentence}" for sentence in wrong]
        note_times(row, seen)
    for row in rows.values():
        if row.name.startswith("429 half") and row.requests == row.asks:
            row.wrong.append("tries: not one 429 was drawn, so that nothing was tried again: ask for more")
    return list(rows.values())


def note_times(row: Row, seen: Seen) -> None:
    if not seen.truths or not seen.truth["stream"] or seen.ask.get("raw"):
        return
    for arrived, sent in zip(seen.record["arrivals_ns"], seen.truth["sent_ns"], strict=False):
        if len(arrived) == len(sent):
            row.later_ns += [a - s for a, s in zip(arrived, sent, strict=True)]
    arrived, sent = seen.record["arrivals_ns"][0], seen.truth["sent_ns"][0]
    if arrived and sent and len(seen.truths) == 1:
        row.ttft_ns.append(arrived[0] - seen.record["start_ns"])
        row.ttft_true_ns.append(sent[0] - seen.truth["accepted_ns"])


def table(rows: list[Row], versions: dict[str, str]) -> str:
    """A line for each row, a heading for each client."""
    heads = ("asked", "asks", "reqs", "TTFT", "truth", "later p50", "max", "", "checked")
    line = "{:34} {:>4} {:>4} {:>8} {:>8} {:>9} {:>8}  {:5} {}"
    lines = [line.format(*heads)]
    client = None
    for row in rows:
        if row.client != client:
            client = row.client
            lines += ["", f"{client} {versions[client]}"]
        told = row.as_json()
        times = [told[name] for name in ("ttft_ms", "ttft_true_ms", "later_ms", "later_ms_max")]
        shown = ["" if t is None else f"{t:.2f}" for t in times]
        result = "WRONG" if row.wrong else "ok"
        lines.append(
            line.format(row.name, row.asks, row.requests, *shown, result, " ".join(told["checked"])).rstrip()
        )
        lines += [f"    {'':30}raised {name}" for name in told["raised"]]
    return "\n".join(lines)
