"""A model's chat template: the text that a server makes of messages before it cuts it into tokens.

Templates are Jinja, kept in a model's folder as `chat_template.jinja`, or in `tokenizer_config.json` as
`chat_template` (a text, or a list of named ones of which `default` counts). They are somebody's code, so they
run in Jinja's sandbox. Messages, the special tokens by their names and `add_generation_prompt` are what they
are given, and the helpers that the Transformers library gives them.

Source: huggingface.co/docs/transformers/chat_templating.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, install_hint
from llmtap.units import NS_PER_S
from llmtap.user_files import decode_json
from llmtap.workload.prompts.prompt import Prompt

__all__ = ["ChatTemplate"]

_INSTALL: Final = install_hint("tokenizers")
FRAMES_MAX: Final = 256
"""System prompts whose rendering is remembered, in prompts that have no history."""
_SAMPLES: Final = ("who will read", "there was a river")
"""Two texts that a template which passes texts on must pass on both."""


class ChatTemplate:
    """Renders prompts. Texts that the template passes on as they are cost no rendering of their own."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], place: str, *, now_ns: int | None = None
    ) -> None:
        """`special_tokens` by name, as `bos_token`. `now_ns`: UTC, for templates that tell the date.

        Raises ConfigError that names `place`, for a template that is none.
        """
        try:
            import jinja2
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ConfigError(place, "the package jinja2 is not installed", _INSTALL) from None
        now = datetime.fromtimestamp((SystemClock.wall_ns() if now_ns is None else now_ns) // NS_PER_S, UTC)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = now.strftime
        self._place = place
        self._error = jinja2.TemplateError
        self._special = dict(special_tokens)
        self._frames: OrderedDict[str, tuple[str, str] | None] = OrderedDict()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(place, f"its chat template is not Jinja: {exc}") from None

    @classmethod
    def load(cls, folder: Path, place: str) -> "ChatTemplate":
        """The template in a model's folder. Raises ConfigError that names `place`."""
        file = folder / "tokenizer_config.json"
        try:
            config = decode_json(file.read_bytes()) if file.is_file() else {}
        except (OSError, ValueError) as exc:
            raise ConfigError(place, f"{file} cannot be read: {exc}") from None
        if not isinstance(config, dict):
            raise ConfigError(place, f"{file} is no JSON object")
        alone = folder / "chat_template.jinja"
        source = alone.read_text("utf-8") if alone.is_file() else _default(config.get("chat_template"))
        if source is None:
            raise ConfigError(
                place, f"{folder} has no chat template",
                "give the tokenizer.json itself to count plain text, or a folder with chat_template.jinja",
            )  # fmt: skip
        special = {
            name: text
            for name, value in config.items()
            if name.endswith("_token")
            and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
        }
        return cls(source, special, place)

    def render(self, prompt: Prompt) -> str:
        """The text that the server cuts. Raises ConfigError where the template refuses such a prompt."""
        # A template may strip what it passes on, and then frames tell only of texts without white space
        # around them. Conversations hardly begin alike, so theirs would be worked out once for each.
        if prompt.history or prompt.text != prompt.text.strip():
            return self._rendered(prompt, prompt.text)
        key = prompt.system
        if key in self._frames:
            self._frames.move_to_end(key)
        else:
            self._frames[key] = self._frame(prompt)
            if len(self._frames) > FRAMES_MAX:
                self._frames.popitem(last=False)
        frame = self._frames[key]
        return self._rendered(prompt, prompt.text) if frame is None else frame[0] + prompt.text + frame[1]

    def _frame(self, prompt: Prompt) -> tuple[str, str] | None:
        """What stands around the text; None where the template does not just pass it on."""
        one, other = (self._rendered(prompt, sample) for sample in _SAMPLES)
        head, found, tail = one.rpartition(_SAMPLES[0])
        return (head, tail) if found and head + _SAMPLES[1] + tail == other else None

    def _rendered(self, prompt: Prompt, text: str) -> str:
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages += [{"role": role, "content": said} for role, said in prompt.history]
        messages.append({"role": "user", "content": text})
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except self._error as exc:
            raise ConfigError(self._place, f"its chat template refuses the prompt: {exc}") from None


def _default(template: Any) -> str | None:
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own makes HTML entities of some characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
