"""What the engine says: the text of each choice, where it ends, and how. Pure."""

from llmtap.sim.server.faults import REFUSAL, Mishaps
from llmtap.sim.server.options import TOKENS_MAX, SimOptions
from llmtap.sim.server.shapes.shape import Choice, SimulatedRequest
from llmtap.workload.prompts.text import cut_tokens, say

__all__ = ["block", "choose"]


def choose(asked: SimulatedRequest, options: SimOptions, mishaps: Mishaps, key: str, exact: bool) -> Choice:
    """What is to be said. `exact`: so many tokens as the options say, whatever else is asked for."""
    match mishaps.refusal:
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
    """What is left of a choice that the output filter stops at token `after`; what it holds then is lost."""
    tokens, hold = len(choice.pieces), options.guardrails.output_hold
    if after < tokens:
        size = tokens if hold == "all" else max(1, hold)
        del choice.pieces[after // size * size :]
        choice.finish, choice.stop_text = "content_filter", None


def _stop(choice: Choice, asked: SimulatedRequest) -> None:
    """End the choice where a stop string is complete, not before `min_tokens`.

    The string was generated and counts, and is not said.
    """
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
