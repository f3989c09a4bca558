"""Decide the content of a simulated answer: injected faults, text, finish reasons, and lengths of prompts.

From a request, the server's options and a random generator to the `Choice`s of its answer: a string for each
token and how it ends. `prefix_blocks` gives the hashes of a prompt for the prefix cache. Functions without
state of their own, called by `reception.py`. The times of the tokens come from `delivery.py`, the bytes of
each API from `shapes/`.
"""

import random
from dataclasses import dataclass
from typing import Final

from llmtap.sim.server.options import TOKENS_MAX, FaultKind, RefusalKind, SimOptions
from llmtap.sim.server.shapes.shape import Choice, SimulatedRequest
from llmtap.workload.prompts.text import count_tokens, cut_tokens, say, token_ids

REFUSAL: Final = "I'm sorry, but I can't help with that."


@dataclass(frozen=True, slots=True)
class RequestFaults:
    fault: FaultKind | None = None
    refusal: RefusalKind | None = None
    block_after: int | None = None


def draw_faults(options: SimOptions, chance: random.Random) -> RequestFaults:
    """Draw the faults, always with three numbers, so that one rate does not affect the others."""
    at = (chance.random(), chance.random(), chance.random())
    fault: FaultKind | None = None
    reached = 0.0
    for kind, rate in options.faults.rates():
        reached += rate
        if at[0] < reached:
            fault = kind
            break
    g = options.guardrails
    return RequestFaults(
        fault=fault,
        refusal=g.refusal if at[1] < g.refusal_rate else None,
        block_after=g.block_after if at[2] < g.block_rate else None,
    )


def choose(
    asked: SimulatedRequest, options: SimOptions, faults: RequestFaults, key: str, exact: bool
) -> Choice:
    """Return the text of a choice. `exact`: with the options' number of tokens, whatever was asked."""
    match faults.refusal:
        case "content_filter" | "error":
            return Choice([], "content_filter")
        case "text" | "field" as kind:
            return Choice(cut_tokens(REFUSAL), refused=kind == "field")
    natural, limit = options.tokens, asked.max_tokens
    count, finish = natural, "stop"
    if not exact:
        count = max(limit or natural if asked.ignore_eos else natural, asked.min_tokens)
        if limit is not None and (count > limit or asked.ignore_eos):
            count, finish = limit, "length"
    if count > TOKENS_MAX:
        count, finish = TOKENS_MAX, "length"
    choice = Choice(list(say(count, key)), finish)
    if asked.stop:
        _stop(choice, asked)
    return choice


def block(choice: Choice, after: int, options: SimOptions) -> None:
    """Cut a choice that the output filter stops at token `after`; what it holds then is lost."""
    tokens, hold = len(choice.pieces), options.guardrails.output_hold
    if after < tokens:
        size = tokens if hold == "all" else max(1, hold)
        del choice.pieces[after // size * size :]
        choice.finish, choice.stop_text = "content_filter", None


def _stop(choice: Choice, asked: SimulatedRequest) -> None:
    """End the choice where a stop string is complete, not before `min_tokens`; it counts, but is not sent."""
    text = choice.text
    start = sum(map(len, choice.pieces[: asked.min_tokens]))
    found = [(at, stop) for stop in asked.stop if (at := text.find(stop, start)) >= 0]
    if not found:
        return
    at, stop = min(found, key=lambda hit: hit[0] + len(hit[1]))
    chars = 0
    for i, piece in enumerate(choice.pieces):
        begun, chars = chars, chars + len(piece)
        choice.pieces[i] = piece[: max(0, at - begun)]
        if chars >= at + len(stop):
            del choice.pieces[i + 1 :]
            break
    choice.finish, choice.stop_text = "stop", stop


def prompt_lengths(asked: SimulatedRequest) -> list[int]:
    """Return the tokens of each prompt. For several that came as tokens, the sum is split evenly."""
    if asked.prompt_tokens is None:
        return [count_tokens(prompt) for prompt in asked.prompts]
    each, more = divmod(asked.prompt_tokens, max(1, len(asked.prompts)))
    return [each + (i < more) for i in range(len(asked.prompts))]


def prefix_blocks(prompt: str, size: int) -> tuple[int, ...]:
    """Return a hash of each whole block of `size` tokens and all before it."""
    tokens = token_ids(prompt)
    blocks: list[int] = []
    before = 0
    for end in range(size, len(tokens) + 1, size):
        before = hash((before, *tokens[end - size : end]))
        blocks.append(before)
    return tuple(blocks)
