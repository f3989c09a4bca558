"""A chat template renders what a server would make of the messages, in a sandbox, or says why it cannot."""

import json
from pathlib import Path

import pytest

from llmtap.errors import ConfigError
from llmtap.workload.prompts.prompt import Prompt
from llmtap.workload.prompts.tokenizer import ChatTemplate
from tests.support.model_folder import CHATML

pytest.importorskip("jinja2", reason="jinja2 is not installed")

ASKED = Prompt(text="the river", system="be brief", history=(("user", "hello"), ("assistant", "yes")))
DAY_NS = 1_700_000_000_000_000_000  # 2023-11-14


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "--tokenizer", now_ns=DAY_NS)


def test_chatml_is_rendered_as_transformers_does() -> None:
    """The text is what `apply_chat_template(..., tokenize=False)` of Transformers 5.23 gave for CHATML."""
    assert template(CHATML).render(ASKED) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nthe river<|im_end|>\n<|im_start|>assistant\n"
    )


CASES = {
    "special tokens": ("{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}", "<s>the river</s>"),
    "block trimming": ("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}", "x\n"),
    "loop controls": ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
    "tojson leaves letters alone": ("{{ {'a': '<ü>'} | tojson }}", '{"a": "<ü>"}'),
    "the date": ("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023"),
    "no tools": ("{% if tools is none %}none{% endif %}", "none"),
    "strips": ("[{{ messages[-1].content | trim }}]", "[the river]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_templates_have_what_transformers_gives_them(name: str) -> None:
    source, rendered = CASES[name]
    assert template(source).render(ASKED) == rendered


@pytest.mark.parametrize("text", ["one", "  one  ", "a b\n", "", "{{ x }}", "user"])
@pytest.mark.parametrize(
    "source",
    [CHATML, "[{{ messages[-1].content | trim }}]", "{{ messages[-1].content | upper }}",
     "{{ messages[-1].content }}{{ messages[-1].content }}"],
)  # fmt: skip
def test_remembered_frames_change_nothing(source: str, text: str) -> None:
    made = template(source)
    for _ in range(2):
        made.render(Prompt(text="warm up"))
        straight = made._rendered(Prompt(text=text), text)
        assert made.render(Prompt(text=text)) == straight


def test_a_template_that_refuses_is_a_sentence() -> None:
    made = template("{{ raise_exception('no system role') if messages[0].role == 'system' }}ok")
    assert made.render(Prompt(text="x")) == "ok"
    with pytest.raises(
        ConfigError, match=r"^--tokenizer: its chat template refuses the prompt: no system role"
    ):
        made.render(ASKED)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os }}"],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^--tokenizer: its chat template refuses"):
        template(source).render(ASKED)


def test_what_is_no_jinja_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--tokenizer: its chat template is not Jinja"):
        template("{% for")


def written(folder: Path, config: object, file: str | None = None) -> Path:
    (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    return folder


@pytest.mark.parametrize(
    ("config", "file", "rendered"),
    [
        ({"chat_template": "config {{ bos_token }}", "bos_token": "<b>"}, None, "config <b>"),
        ({"chat_template": "config", "bos_token": {"content": "<b>"}}, "file {{ bos_token }}", "file <b>"),
        (
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
            None,
            "d",
        ),
    ],
)
def test_the_folder_says_which_template(
    tmp_path: Path, config: object, file: str | None, rendered: str
) -> None:
    made = ChatTemplate.load(written(tmp_path, config, file), "--tokenizer")
    assert made.render(Prompt(text="x")) == rendered


@pytest.mark.parametrize(
    ("config", "problem"),
    [({}, "has no chat template"), ("{", "cannot be read"), ("[]", "is no JSON object"),
     ({"chat_template": [{"name": "rag", "template": "r"}]}, "has no chat template")],
)  # fmt: skip
def test_a_folder_without_one_is_named(tmp_path: Path, config: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--tokenizer: .*{problem}"):
        ChatTemplate.load(written(tmp_path, config), "--tokenizer")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"^--tokenizer: the package jinja2 is not installed"):
        template("x")
