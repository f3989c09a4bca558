"""The endpoints that give answers: how each reads a request, writes an answer, and says what went wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llmtap.sim.server.options import CHOICES_MAX
from llmtap.sim.server.shapes import anthropic, ollama, openai_chat, openai_completions, openai_responses
from llmtap.sim.server.shapes.shape import Answer, Shape, SimulatedRequest

__all__ = ["ENDPOINTS", "Endpoint", "openai_error"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of them."""

    path: str
    read: Callable[[bytes], SimulatedRequest]
    shape: Callable[[Answer], Shape]
    error: Callable[[int, str, str], dict[str, Any]]
    """The body of an answer with a status, of a code and a sentence."""
    choices_max: int = 1


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """The body of an answer with a status, in OpenAI's form."""
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _anthropic_error(status: int, code: str, message: str) -> dict[str, Any]:
    kinds = {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    return {
        "type": "error",
        "error": {"type": kinds.get(status, "invalid_request_error"), "message": message},
    }


def _ollama_error(status: int, code: str, message: str) -> dict[str, Any]:
    return {"error": message}


ENDPOINTS: Final = (
    Endpoint(
        "/v1/chat/completions", openai_chat.read, openai_chat.OpenAIChatShape, openai_error, CHOICES_MAX
    ),
    Endpoint(
        "/v1/completions", openai_completions.read, openai_completions.OpenAICompletionsShape, openai_error,
        CHOICES_MAX,
    ),
    Endpoint("/v1/responses", openai_responses.read, openai_responses.OpenAIResponsesShape, openai_error),
    Endpoint("/v1/messages", anthropic.read, anthropic.AnthropicShape, _anthropic_error),
    Endpoint("/api/chat", ollama.read_chat, ollama.OllamaChat, _ollama_error),
    Endpoint("/api/generate", ollama.read_generate, ollama.OllamaGenerate, _ollama_error),
)  # fmt: skip
