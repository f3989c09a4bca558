"""Separate thinking from the content of a chat: `<think>...</think>` at the start, markers cut at any place.

`dialects/openai_chat.py` feeds each piece of content, and gets its reasoning and content. Servers without a
reasoning parser (llama.cpp, MLX) and Gemini's compatible form (`<thought>`) send it. A marker that comes
later is text.
"""

from typing import Final

_OPENING: Final = ("<think>", "<thought>", "<thinking>")


class InlineThinking:
    """Takes the content of one choice apart. The markers are no text, nor is a part of one until it is known
    to be something else."""

    __slots__ = ("_closing", "_held", "settled")

    def __init__(self) -> None:
        self.settled = False
        """Treat the rest of this choice as content."""
        self._closing = ""  # the marker that ends the thinking going on
        self._held = ""  # what may become a marker

    def feed(self, text: str) -> tuple[str, str]:
        """`(reasoning, content)` in the next piece of content."""
        if self.settled:
            return "", text
        text = self._held + text
        self._held = ""
        if self._closing:
            return self._inside(text)
        rest = text.lstrip()
        if not rest:
            return "", text
        blank = text[: len(text) - len(rest)]
        for marker in _OPENING:
            if rest.startswith(marker):
                self._closing = f"</{marker[1:]}"
                reasoning, content = self._inside(rest[len(marker) :])
                return reasoning, blank + content
        if any(marker.startswith(rest) for marker in _OPENING):
            self._held = rest
            return "", blank
        self.settled = True
        return "", text

    def close(self) -> tuple[str, str]:
        """As `feed`, for what is held at the end: an unfinished marker is text."""
        held, self._held = self._held, ""
        return (held, "") if self._closing else ("", held)

    def _inside(self, text: str) -> tuple[str, str]:
        closing = self._closing
        at = text.find(closing)
        if at >= 0:
            self.settled = True
            return text[:at], text[at + len(closing) :]
        # The longest end of the text that the marker may begin with.
        for size in range(min(len(closing) - 1, len(text)), 0, -1):
            if text.endswith(closing[:size]):
                self._held = text[-size:]
                return text[:-size], ""
        return text, ""
