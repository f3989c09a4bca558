"""`llmtap inspect --draft` and `--fixture`, as one types them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.traces import Call
from tests.protocol.structure.streams.forms import LAKE, Stream, so_far, stream
from tests.protocol.structure.streams.invented import INVENTED
from tests.protocol.structure.streams.silent import SILENT


def save(folder: Path, found: Stream, *, lines: bool = False) -> Path:
    """Write a stream as server-sent events, or as lines."""
    path = folder / ("a.ndjson" if lines else "a.sse")
    out = b""
    for event in found.events:
        name = b"" if event.event is None else b"event: " + event.event + b"\n"
        out += (event.data or b"") + b"\n" if lines else name + b"data: " + (event.data or b"") + b"\n\n"
    path.write_bytes(out)
    return path


@pytest.fixture
def sse(tmp_path: Path) -> Path:
    return save(tmp_path, stream("a", INVENTED["nested_usage_end"](LAKE)))


@pytest.fixture
def ndjson(tmp_path: Path) -> Path:
    return save(tmp_path, stream("a", INVENTED["cumulative_lines"](LAKE)), lines=True)


def inspected(call: Call, path: Path, *args: object) -> dict[str, Any]:
    code, out, err = call("inspect", path, "--json", *args)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("kind", ["sse", "ndjson"])
def test_a_draft_reads_the_stream_that_it_was_made_of(
    kind: str, tmp_path: Path, call: Call, request: Any
) -> None:
    path = request.getfixturevalue(kind)
    table = tmp_path / "acme.toml"
    code, out, err = call("inspect", path, "--draft", "acme.chat", "--out", table)
    assert (code, out, err) == (0, "", f"llmtap: wrote {table}\n")
    code, out, _ = call("inspect", path, "--draft", "acme.chat")
    assert out.strip() == table.read_text().strip()
    inferred, drafted = inspected(call, path), inspected(call, path, "--dialect", table)
    assert (inferred["dialect"], drafted["dialect"]) == (None, "acme.chat")
    assert drafted["tokens"]["source"] == "usage"
    for key in ("events", "tokens", "outcome"):
        assert drafted[key] == inferred[key]


def test_a_text_that_grows_is_drafted_though_it_can_be_that_of_a_person(tmp_path: Path, call: Call) -> None:
    path = save(tmp_path, stream("a", [{"text": text} for text in so_far(LAKE)]))
    assert inspected(call, path)["reading"] == "none"
    table = tmp_path / "acme.toml"
    assert call("inspect", path, "--draft", "acme", "--out", table)[0] == 0
    drafted = inspected(call, path, "--dialect", table)
    assert (drafted["reading"], drafted["tokens"]["output"]) == ("dialect", len(LAKE))


def test_a_draft_shows_no_text_if_asked(sse: Path, call: Call) -> None:
    _, out, _ = call("inspect", sse, "--draft", "acme")
    assert '"The"' in out
    _, out, _ = call("inspect", sse, "--draft", "acme", "--no-text")
    assert '"The"' not in out


def test_what_cannot_be_drafted_is_named(tmp_path: Path, sse: Path, call: Call) -> None:
    silent = save(tmp_path / "..", next(s for s in SILENT if s.name == "k8s_watch"))
    for args, problem in (
        ((silent, "--draft", "acme"), "no generated text was found in 4 events"),
        ((sse, "--draft", "Ac me"), "got 'Ac me'"),
        ((sse, "--draft", "acme", "--fixture", "acme"), "cannot be combined"),
        ((sse, "--out", "x"), "no effect without --draft or --fixture"),
        ((sse, "--fixture", "../x"), "is not a valid name"),
        ((sse, "--fixture", "x", "--out", sse / "none"), "cannot create the folder"),
    ):
        code, out, err = call("inspect", *args)
        assert (code, out) == (2, "") and problem in err


def test_a_stream_of_a_known_dialect_needs_no_table(call: Call) -> None:
    code, out, err = call("inspect", Path("tests/data/dialects/cohere_v2_chat.sse"), "--draft", "mine")
    assert code == 0 and "[dialects.mine]" in out and "llmtap knows its dialect cohere.v2" in err


def test_a_fixture_is_written_and_read_again(tmp_path: Path, sse: Path, call: Call) -> None:
    code, _, _ = call(
        "inspect", sse, "--path", "/v1/acme", "--fixture", "acme_basic", "--out", tmp_path / "new"
    )
    assert code == 0
    tmp_path /= "new"
    written = tmp_path / "acme_basic.json"
    doc = json.loads(written.read_text())
    assert (tmp_path / "acme_basic.sse").read_bytes() == sse.read_bytes()
    assert doc["request"]["path"] == "/v1/acme"
    classes = [e["class"] for e in doc["expect"]["events"]]
    assert classes == ["metadata", *["content"] * len(LAKE), "done"]
    assert doc["expect"]["usage"]["normalized"] == {"prompt_tokens": 9, "completion_tokens": len(LAKE)}
    before = written.read_bytes()
    code, _, _ = call("inspect", written, "--fixture", "acme_basic", "--out", tmp_path)
    assert (code, written.read_bytes()) == (0, before)
    code, _, err = call("inspect", sse, "--fixture", "acme_basic", "--out", tmp_path)
    assert code == 2 and "exists" in err


@pytest.mark.parametrize(
    ("right", "wrong", "note"),
    [
        ("content =", 'content = "nowhere" #', ".content: no value at nowhere in "),
        ("usage =", 'usage = "nowhere" #', ".usage: no value at nowhere in "),
        ("output =", 'output = "nowhere" #', "dialects.acme.counts.output: no value at nowhere of the usage"),
        ("event =", 'event = "nowhere" #', ": fits no event"),
    ],
    ids=["content", "usage", "count", "event"],
)
def test_a_path_that_leads_to_nothing_is_noted(
    right: str, wrong: str, note: str, tmp_path: Path, sse: Path, call: Call
) -> None:
    table = tmp_path / "acme.toml"
    call("inspect", sse, "--draft", "acme", "--out", table)
    _, _, err = call("inspect", sse, "--dialect", table)
    assert "note" not in err
    assert f"\n{right}" in table.read_text()
    table.write_text(table.read_text().replace(f"\n{right}", f"\n{wrong}", 1))
    code, _, err = call("inspect", sse, "--dialect", table)
    assert (code, note in err) == (0, True), err


ZX = [
    ("zx.begin", {"conversation": "c-17", "engine": "zephyr-9"}),
    *(("zx.say", {"n": n, "piece": {"words": word}, "lane": "main"}) for n, word in enumerate(LAKE)),
    ("zx.meter", {"spent": {"asked_for": 12, "written": 20}}),
    ("zx.over", {"because": "finished"}),
]
"""A stream whose text is found by its structure, and in which no name of another value is known."""


@pytest.fixture
def zx(tmp_path: Path) -> Path:
    path = tmp_path / "zx.sse"
    path.write_text("".join(f"event: {name}\ndata: {json.dumps({'zx': value})}\n\n" for name, value in ZX))
    return path


def line_of(text: str, part: str) -> str:
    (line,) = [line for line in text.splitlines() if part in line]
    return line


def test_a_draft_lists_candidates_for_what_it_lacks(zx: Path, call: Call) -> None:
    _, out, _ = call("inspect", zx, "--draft", "zx")
    model = line_of(out, "model = []  # check: ")
    assert model.endswith(': "zx.conversation" = "c-17", "zx.engine" = "zephyr-9", "zx.lane" = "main"')
    assert line_of(out, "no `finish_reason`").endswith(': "zx.because" = "finished"')
    integers = f': "zx.n" = {len(LAKE) - 1}, "zx.spent.asked_for" = 12, "zx.spent.written" = 20'
    assert line_of(out, "no `usage`").endswith(integers)
    end = line_of(out, 'end = "none"  # check: ')
    assert '"done", "[DONE]", "finish_reason"' in end and 'event = "zx.over"' in end
    _, out, _ = call("inspect", zx, "--draft", "zx", "--no-text")
    assert "zephyr-9" not in out and "finished" not in out and '"zx.engine"' in out


def test_the_suggestions_of_a_draft_read_model_end_and_usage(zx: Path, tmp_path: Path, call: Call) -> None:
    table = tmp_path / "zx.toml"
    _, out, _ = call("inspect", zx, "--draft", "zx")
    head, _, rest = out.partition("# check: remove `# ` where this is right")
    suggested, _, rest = rest.partition("\n\n")
    suggestions = [line.removeprefix("#").strip() for line in suggested.splitlines()[1:]]
    head = head.replace("model = []", 'model = "zx.engine"').replace('end = "none"', 'end = "done"')
    table.write_text("\n".join((head, *suggestions, "", rest)))
    found = inspected(call, zx, "--dialect", table)
    assert (found["tokens"]["source"], found["tokens"]["input"], found["tokens"]["output"]) == (
        "usage",
        12,
        20,
    )
    assert (found["model"], found["finish_reason"]) == ("zephyr-9", "finished")
    assert [e["class"] for e in found["events"]] == ["metadata", *["content"] * len(LAKE), "usage", "done"]
    _, _, err = call("inspect", zx, "--dialect", table)
    assert "note" not in err
    table.write_text(table.read_text().replace('"zx.engine"', '"zx.motor"'))
    _, _, err = call("inspect", zx, "--dialect", table)
    assert f"dialects.zx.model: no text at zx.motor in {len(ZX)} events" in err
    table.write_text(table.read_text().replace('"zx.because"', '"zx.why"'))
    _, _, err = call("inspect", zx, "--dialect", table)
    assert ".finish_reason: no value at zx.why in 1 events" in err


@pytest.mark.parametrize(
    ("last", "suggested"),
    [
        (
            {"op": "tally", "n": {"eaten": 17, "spun": 42, "whole": True}},
            ['# event = "tally"', '# usage = "n"'],
        ),
        ({"n": {"spun": 42}}, ['# has = "n"', '# output = "spun"  # 42']),
        (
            {"op": "grow", "answer": "", "n": {"eaten": 17, "spun": 42}},
            ['# usage = "n"', '# input = "eaten"  # 17'],
        ),
        ({"op": "tally", "eaten": 17, "spun": 42}, ['# event = "tally"', '# usage = "."']),
        ({"op": "bye"}, ['# event = "bye"', '# event_class = "done"  # and end = "done" above']),
    ],
    ids=["named", "nameless", "event of output", "flat", "end"],
)
def test_the_suggested_rule_fits_the_last_event(
    last: dict[str, Any], suggested: list[str], tmp_path: Path, call: Call
) -> None:
    path = tmp_path / "a.sse"
    texts = ["The", " lake", " is", " deep", " and", " cold", "."]
    events = [{**({"op": "grow"} if "op" in last else {}), "answer": text} for text in texts]
    path.write_text("".join(f"data: {json.dumps(event)}\n\n" for event in (*events, last)))
    _, out, _ = call("inspect", path, "--draft", "acme")
    assert set(suggested) <= set(out.splitlines()), out
