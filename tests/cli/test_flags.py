"""The fields of structs are the flags of a command: names, defaults, values by type, and mistakes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
import typer
from msgspec import Meta, Struct
from typer.testing import CliRunner

from llmtap.cli.flags import command
from llmtap.errors import ConfigError
from llmtap.options.fields import flags_given, opt
from llmtap.units import Duration


def doubled(text: str) -> int:
    return 2 * int(text)


def joined(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.upper() for text in texts)


class Inner(Struct, frozen=True, kw_only=True):
    wait: Annotated[Duration, opt("Time to wait.", "TIME")] = Duration(90_000_000_000)
    mode: Annotated[Literal["fast", "slow"], opt("Mode.")] = "fast"
    names: Annotated[tuple[str, ...], opt("Names.", "NAME", "--name", parse=joined)] = ()
    of_the_program: int = 7


class Outer(Struct, frozen=True, kw_only=True):
    source: Annotated[str, opt("Source.", "SOURCE", argument=True)] = ""
    inner: Inner = Inner()
    rate: Annotated[Annotated[float, Meta(gt=0, le=10)] | None, opt("Rate.", "RPS")] = None
    count: Annotated[Annotated[int, Meta(ge=1)] | None, opt("Count.", "N")] = None
    fresh: Annotated[bool, opt("Whether.")] = False
    twice: Annotated[int, opt("Twice the number.", "N", parse=doubled, shown="4")] = 8


def run(*args: str) -> Any:
    app, found = typer.Typer(rich_markup_mode=None), []

    @command(app)
    def go(outer: Outer, seed: Annotated[int, opt("Seed.", "N", ge=0)] = 42) -> None:
        found.append((outer, seed))

    done = CliRunner().invoke(app, args)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return found[0] if found else done.output


def test_without_flags_the_fields_have_their_defaults() -> None:
    assert run() == (Outer(), 42)
    assert flags_given(Outer(), Inner()) == []


def test_flags_are_read_by_the_type_of_their_field() -> None:
    given = ("x", "--wait", "2s", "--mode", "slow", "--name", "a", "--name", "b", "--rate", "2.5")
    outer, seed = run(*given, "--count", "3", "--fresh", "--twice", "5", "--seed", "1")
    inner = Inner(wait=Duration(2_000_000_000), mode="slow", names=("A", "B"))
    assert outer == Outer(source="x", inner=inner, rate=2.5, count=3, fresh=True, twice=10)
    assert isinstance(outer.inner.wait, Duration)
    assert seed == 1
    assert flags_given(inner) == ["--wait", "--mode", "--name"]


def test_the_help_has_the_flags_of_described_fields_with_their_defaults() -> None:
    text = " ".join(run("--help").split())
    assert "--wait TIME Time to wait. [default: 90s]" in text
    assert "--twice N Twice the number. [default: 4]" in text
    assert "--name NAME Names." in text
    assert "of-the-program" not in text


@pytest.mark.parametrize(
    ("args", "place", "problem"),
    [
        (("--wait", "soon"), "--wait", "expected a duration such as 30, 0.5 or '500ms', got 'soon'"),
        (("--wait", "30000h"), "--wait", "'30000h' is longer than the maximum of 1,000 days"),
        (("--mode", "quick"), "--mode", "expected one of fast, slow, got 'quick'"),
        (("--rate", "0"), "--rate", "expected a number above 0, at most 10, got 0"),
        (("--rate", "nan"), "--rate", "expected a finite number, got nan"),
    ],
)
def test_a_mistake_names_the_flag(args: tuple[str, ...], place: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(*args)
    assert (refused.value.place, refused.value.problem) == (place, problem)
