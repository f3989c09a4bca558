"""As much of Go's templates, with Helm's functions, as our chart uses: for tests where there is no `helm`.

Comments, `define`, `include`, `if`/`else`, `with`, `{{- -}}`, `$name := ...`, pipelines and parentheses. What
it does not know is an error, so that the chart cannot say more than is tested.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\(|\)|\||[^\s()|]+')


@dataclass
class Node:
    """`text`, `output`, `set`, or a block: `if` or `with`, with what is inside, and inside `else`."""

    kind: str
    text: str = ""
    inside: "list[Node]" = field(default_factory=list)
    otherwise: "list[Node]" = field(default_factory=list)


class Templates:
    """Templates of a chart by name."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._defined: dict[str, list[Node]] = {}
        self._files: dict[str, list[Node]] = {}
        for name, source in sources.items():
            pieces = _pieces(source)
            self._files[name] = self._parse(pieces)
            assert not pieces, f"{name}: an end too many"

    def render(self, name: str, data: Mapping[str, Any]) -> str:
        """A file's text."""
        return self._write(self._files[name], data, {"$": data})

    def _parse(self, pieces: list[tuple[str, str]]) -> list[Node]:
        """Up to the end, or to the `end` or `else` that closes the block around (left in place)."""
        nodes: list[Node] = []
        while pieces:
            kind, text = pieces[0]
            word = text.partition(" ")[0]
            if kind == "action" and word in ("end", "else"):
                return nodes
            pieces.pop(0)
            if kind == "text":
                nodes.append(Node("text", text))
            elif text.startswith("/*"):
                continue
            elif word in ("if", "with", "define"):
                node = Node(word, text.removeprefix(word).strip(), self._parse(pieces))
                if pieces[0][1] == "else":
                    pieces.pop(0)
                    node.otherwise = self._parse(pieces)
                assert pieces.pop(0)[1] == "end", text
                if word == "define":
                    self._defined[json.loads(node.text)] = node.inside
                else:
                    nodes.append(node)
            else:
                nodes.append(Node("set" if ":=" in text else "output", text))
        return nodes

    def _write(self, nodes: list[Node], dot: Any, names: dict[str, Any]) -> str:
        names = dict(names)
        out: list[str] = []
        for node in nodes:
            match node.kind:
                case "text":
                    out.append(node.text)
                case "set":
                    name, _, value = node.text.partition(":=")
                    names[name.strip()] = self._value(value, dot, names)
                case "output":
                    value = self._value(node.text, dot, names)
                    out.append(str(value).lower() if isinstance(value, bool) else str(value))
                case kind:
                    value = self._value(node.text, dot, names)
                    inner = value if kind == "with" else dot
                    out.append(self._write(node.inside, inner, names) if value
                               else self._write(node.otherwise, dot, names))  # fmt: skip
        return "".join(out)

    def _value(self, text: str, dot: Any, names: dict[str, Any]) -> Any:
        tokens = _TOKEN.findall(text)
        value = self._pipeline(tokens, dot, names)
        assert not tokens, f"left over in {text!r}: {tokens}"
        return value

    def _pipeline(self, tokens: list[str], dot: Any, names: dict[str, Any]) -> Any:
        value = self._command(tokens, dot, names, [])
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            value = self._command(tokens, dot, names, [value])
        return value

    def _command(self, tokens: list[str], dot: Any, names: dict[str, Any], last: list[Any]) -> Any:
        head = tokens[0]
        if head in self._functions():
            tokens.pop(0)
            args = []
            while tokens and tokens[0] not in ("|", ")"):
                args.append(self._operand(tokens, dot, names))
            return self._functions()[head](*args, *last)
        assert not last, f"{head} is no function"
        return self._operand(tokens, dot, names)

    def _operand(self, tokens: list[str], dot: Any, names: dict[str, Any]) -> Any:
        token = tokens.pop(0)
        if token == "(":
            value = self._pipeline(tokens, dot, names)
            assert tokens.pop(0) == ")"
            return value
        if token.startswith('"'):
            return json.loads(token)
        if re.fullmatch(r"\d+", token):
            return int(token)
        if token == ".":
            return dot
        root, _, path = token.partition(".")
        assert root == "" or root.startswith("$"), f"unknown function {token!r}"
        value = names[root] if root else dot
        for key in filter(None, path.split(".")):
            assert key in value, f"{token}: there is no {key!r}"
            value = value[key]
        return value

    def _named(self, name: str) -> list[Node]:
        return self._defined[name] if name in self._defined else self._files[name]

    def _functions(self) -> dict[str, Callable[..., Any]]:
        return {
            "include": lambda name, data: self._write(self._named(name), data, {"$": data}),
            "default": lambda other, value: value or other,
            "quote": lambda value: json.dumps(str(value)),
            "nindent": lambda n, text: "\n" + _indented(n, text),
            "indent": lambda n, text: _indented(n, text),
            "toYaml": lambda value: yaml.safe_dump(value, sort_keys=True).rstrip("\n"),
            "trunc": lambda n, text: text[:n],
            "trimSuffix": lambda end, text: text.removesuffix(end),
            "contains": lambda part, text: part in text,
            "printf": lambda form, *args: form % args,
            "print": lambda *args: "".join(map(str, args)),
            "add": lambda *args: sum(args),
            "and": lambda *args: next((value for value in args if not value), args[-1]),
            "gt": lambda left, right: left > right,
            "int": int,
            "hasKey": lambda found, key: key in found,
            "fail": _fail,
            "required": _required,
            "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
        }


def _fail(message: str) -> Any:
    raise AssertionError(message)


def _required(message: str, value: Any) -> Any:
    assert value, message
    return value


def _indented(n: int, text: str) -> str:
    return "\n".join(" " * n + line for line in str(text).split("\n"))


def _pieces(source: str) -> list[tuple[str, str]]:
    """Texts and actions in turn; `-` takes the white space beside it away."""
    found: list[tuple[str, str]] = []
    at, trim = 0, False
    for m in _ACTION.finditer(source):
        text = source[at : m.start()]
        text = text.lstrip() if trim else text
        found += [("text", text.rstrip() if m[1] else text), ("action", m[2])]
        at, trim = m.end(), bool(m[3])
    found.append(("text", source[at:].lstrip() if trim else source[at:]))
    return [piece for piece in found if piece != ("text", "")]
