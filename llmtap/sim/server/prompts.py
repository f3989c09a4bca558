"""What the engine is asked: how long prompts are, and how far they are alike. Pure."""

from llmtap.sim.server.shapes.shape import SimulatedRequest
from llmtap.workload.prompts.text import count_tokens, token_ids

__all__ = ["prefix_blocks", "prompt_lengths"]


def prompt_lengths(asked: SimulatedRequest) -> list[int]:
    """Tokens of each prompt. Where several came as tokens only their sum is known: the same for each."""
    if asked.prompt_tokens is None:
        return [count_tokens(prompt) for prompt in asked.prompts]
    each, more = divmod(asked.prompt_tokens, max(1, len(asked.prompts)))
    return [each + (i < more) for i in range(len(asked.prompts))]


def prefix_blocks(prompt: str, size: int) -> tuple[int, ...]:
    """A number for each whole block of so many tokens, which stands for all that is before it as well: two
    prompts have the same numbers as far as they begin alike."""
    tokens = token_ids(prompt)
    blocks: list[int] = []
    before = 0
    for end in range(size, len(tokens) + 1, size):
        before = hash((before, *tokens[end - size : end]))
        blocks.append(before)
    return tuple(blocks)
