"""Hostile files of users: exit 2 with the name of the file and, where it is known, the line."""

import sys
from pathlib import Path

import pytest

from llmtap.cli.main import main
from llmtap.user_files import DEPTH_MAX, TOML_BYTES_MAX

DEEP = b"[" * 100_000 + b"]" * 100_000
FILES = {
    "list.json": DEEP,
    "object.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "second-line.jsonl": b'{"timestamp":1,"input_length":1,"output_length":1}\n{"a":%s}\n' % DEEP,
    "list.toml": b"# a comment\n[relay]\nupstream = %s\n" % DEEP,
    "key.toml": b"[relay]\n\n%sa = 1\n" % (b"a." * 50_000),
    "quoted-key.toml": b"[relay]\n\n%sa = 1\n" % (b'"a" . ' * 50_000),
    "header.toml": b"[%sa]\n" % (b"a." * 50_000),
    "inline.toml": b"[relay]\nx = %s1%s\n" % (b"{a=" * 50_000, b"}" * 50_000),
    "digits.toml": b'[relay]\nidle_timeout = "%ss"\n' % (b"9" * 400),
    "size.toml": b'[relay]\nhead_bytes = "%sMiB"\n' % (b"9" * 400),
    "integer.toml": b"[relay]\nhead_bytes = %s\n" % (b"9" * 5_000),
    "not-utf8.toml": b"\xff",
    "nul.toml": b"[relay]\n\x00",
    "long.toml": b"#" * (TOML_BYTES_MAX + 1),
    "empty.json": b"",
    "nul.json": b'{"a":\x00}',
    "cut.json": b'{"a":[1,2',
}
PROXY = ["proxy", "--check", "--upstream", "http://127.0.0.1:1", "--config"]
METER = ["meter", "--check", "--config"]
READERS = [["report"], ["replay", "--target", "http://127.0.0.1:1"], ["sim", "run"], ["convert"]]
JSON = [name for name in FILES if ".json" in name]
TOML = [name for name in FILES if name.endswith(".toml")]
CASES = [
    *((command, name) for command in READERS for name in JSON),
    *((command, name) for command in (PROXY, METER) for name in TOML),
]
SAID = {
    "list.json": "line 1", "object.json": "line 1", "second-line.jsonl": "line 2",
    "list.toml": "line 3", "key.toml": "line 3", "quoted-key.toml": "line 3", "header.toml": "line 1",
    "inline.toml": "line 2", "digits.toml": "relay.idle_timeout", "size.toml": "relay.head_bytes",
}  # fmt: skip


@pytest.mark.parametrize(("command", "name"), CASES, ids=[f"{' '.join(c[:2])} {n}" for c, n in CASES])
def test_a_hostile_file_is_refused_by_its_name(
    command: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMTAP_CONFIG", raising=False)
    more = ["out.parquet"] if command == ["convert"] else []
    monkeypatch.setattr(sys, "argv", ["llmtap", *command, name, *more])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert name in error
    assert SAID.get(name, name) in error
    assert len(error) < 1_000


def test_dots_and_brackets_in_texts_and_comments_are_no_nesting(tmp_path: Path) -> None:
    from llmtap.user_files import read_toml

    many = "." * 500 + "[{" * 500
    file = tmp_path / "texts.toml"
    file.write_text(
        f'# {many}\na = \'{many}\' # {many}\nb = "\\"{many}"\nc = """\n{many}"\n"""\n'
        f"d = '''\n{many}'''\ne = [{','.join(['1.5'] * 500)}]\n[{'f.' * (DEPTH_MAX - 1)}f]\n"
    )
    content = read_toml(file)
    assert (content["a"], content["b"]) == (many, '"' + many)
    assert len(content["e"]) == 500
