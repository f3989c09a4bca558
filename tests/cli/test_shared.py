"""Files that commands write are checked before anything runs; pairs and durations name their option."""

from pathlib import Path

import pytest

from llmtap.cli.shared import Outputs, option_duration, read_pairs
from llmtap.errors import ConfigError


def told(outputs: Outputs) -> None:
    outputs.tell({"--html": lambda: "page", "--json": lambda: "{}"}, lambda: print("table"))


def test_texts_go_to_their_files_and_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "page.html"
    told(Outputs(html=str(place)))
    assert (place.read_text(), capsys.readouterr().out) == ("page\n", "table\n")
    told(Outputs(html=str(place), json="-"))
    assert capsys.readouterr().out == "{}\n"


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "page.html"
    with pytest.raises(ConfigError, match=f"--html: there is no folder {missing.parent}"):
        Outputs(html=str(missing))
    with pytest.raises(ConfigError, match="--html: cannot write"):
        Outputs(html=str(tmp_path))
    with pytest.raises(ConfigError, match="--markdown: is written to stdout, and --html is, too"):
        Outputs(html="-", markdown="-")


def test_nothing_is_left_of_a_check(tmp_path: Path) -> None:
    page, kept = tmp_path / "page.html", tmp_path / "kept.html"
    kept.write_text("of yesterday")
    for place in (page, kept):
        Outputs(html=str(place))
    assert not page.exists()
    assert kept.read_text() == "of yesterday"


def test_values_of_options_name_the_option() -> None:
    assert read_pairs("--set", ["a = 1", "b=c=d"]) == {"a": "1", "b": "c=d"}
    with pytest.raises(ConfigError, match="--set: expected KEY=VALUE, got 'a'"):
        read_pairs("--set", ["a"])
    with pytest.raises(ConfigError, match="--set a: is given twice"):
        read_pairs("--set", ["a=1", "a=2"], once=True)
    with pytest.raises(ConfigError, match=r"--drain: .* is longer than 1,000 days"):
        option_duration("--drain", "30000h")
