"""Options are read from text by their types alone, and what cannot be read is told with what was expected."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from llmtap.options.fields import opt
from llmtap.options.values import read_options
from llmtap.units import Bytes, Duration


class Options(msgspec.Struct, frozen=True, kw_only=True):
    wait: Annotated[Duration, Meta(description="how long")] = Duration(5_000_000)
    delay: Annotated[Duration | None, Meta(description="how much later")] = None
    mode: Annotated[Literal["fast", "slow"], Meta(description="which way")] = "fast"
    on: Annotated[bool, Meta(description="whether")] = False
    count: Annotated[int, Meta(description="how many", ge=1, le=2_000)] = 8
    least: Annotated[int, Meta(description="at least", ge=3)] = 3
    share: Annotated[float, Meta(description="how much", gt=0)] = 0.5
    edges: Annotated[tuple[int, ...], Meta(description="where")] = ()
    pause: Annotated[Duration, opt("how often", at_least=1_000_000, at_most=10_000_000_000)] = Duration(10**9)
    size: Annotated[Bytes, opt("how large", at_least=256, hint="leave it out")] = Bytes(512)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("wait", "2s", 2_000_000_000),
        ("delay", "0", 0),
        ("delay", "1ms", 1_000_000),
        ("mode", "slow", "slow"),
        ("on", "true", True),
        ("on", "on", True),
        ("on", "Off", False),
        ("count", "2000", 2_000),
        ("share", "2", 2.0),
        ("edges", "1, 30,117", (1, 30, 117)),
        ("edges", "4", (4,)),
    ],
)
def test_values_are_read(name: str, text: str, value: object) -> None:
    read = getattr(read_options(Options, {name: text}, "option"), name)
    assert read == value
    assert isinstance(read, Duration) is (name in ("wait", "delay"))


def test_what_is_not_set_is_as_it_was_and_dashes_are_underscores() -> None:
    assert read_options(Options, {}, "option") == Options()

    class Dashed(msgspec.Struct, frozen=True, kw_only=True):
        two_words: Annotated[int, Meta(description="x")] = 1

    assert read_options(Dashed, {"two-words": "3"}, "option") == Dashed(two_words=3)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("wiat", "2s", "no option is called 'wiat'; did you mean wait?"),
        (
            "?",
            "2s",
            (
                "no option is called '?'; expected one of "
                "wait, delay, mode, on, count, least, share, edges, pause, size"
            ),
        ),
        ("wait", "soon", "wait: expected a duration such as 30, 0.5 or '500ms', got 'soon'"),
        ("mode", "quick", "mode: expected one of fast, slow, got 'quick'"),
        ("on", "maybe", "on: expected true or false, got 'maybe'"),
        ("count", "0", "count: expected a whole number from 1 to 2,000, got '0'"),
        ("least", "2", "least: expected a whole number of at least 3, got '2'"),
        ("share", "0", "share: expected a number above 0, got '0'"),
        ("share", "nan", "share: expected a finite number, got 'nan'"),
        ("edges", "1,x", "edges: expected a whole number, got 'x'"),
        ("pause", "0", "pause: must be at least 1 ms, got 0 ns"),
        ("pause", "11s", "pause: must be at most 10 s, got 11 s"),
        ("size", "255", "size: must be at least 256 B, got 255 B"),
    ],
)
def test_what_cannot_be_read_is_told_with_what_was_expected(name: str, text: str, problem: str) -> None:
    with pytest.raises(ValueError) as told:
        read_options(Options, {name: text}, "option")
    assert str(told.value) == problem
