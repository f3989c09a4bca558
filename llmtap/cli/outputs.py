"""Files that a command writes: whether that is possible is tried before hours of running, not after."""

from pathlib import Path
from typing import Final

from llmtap.errors import ConfigError

__all__ = ["STDOUT", "need_capture", "need_outputs", "write_output"]

STDOUT: Final = "-"


def need_outputs(*, json: str | None, html: str | None, markdown: str | None = None) -> dict[str, Path]:
    """The files of `--json`, `--html` and `--markdown`; what goes to stdout is none.

    Raises ConfigError of an option whose file cannot be written, and where two go to stdout.
    """
    named = {"--json": json, "--html": html, "--markdown": markdown}
    to_stdout = [option for option, name in named.items() if name == STDOUT]
    if len(to_stdout) > 1:
        raise ConfigError(to_stdout[1], f"is written to stdout, and {to_stdout[0]} is, too")
    places = {option: Path(name) for option, name in named.items() if name not in (None, STDOUT)}
    for option, place in places.items():
        if not place.parent.is_dir():
            raise ConfigError(option, f"there is no folder {place.parent}")
        known = place.exists()
        try:
            place.open("ab").close()
            if not known:
                place.unlink()
        except OSError as exc:
            raise _unwritten(option, place, exc) from None
    return places


def need_capture(to: str) -> None:
    """Raises ConfigError of `--capture` where no capture can be written there."""
    from llmtap.capture.store.parquet import check_place

    if not to:
        raise ConfigError("--capture", "names no folder")
    try:
        check_place(to)
    except ConfigError as exc:
        raise ConfigError("--capture", f"{exc.place}: {exc.problem}", exc.hint) from None


def write_output(option: str, place: Path, text: str) -> None:
    """Raises ConfigError where it cannot be written after all."""
    try:
        place.write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise _unwritten(option, place, exc) from None


def _unwritten(option: str, place: Path, exc: OSError) -> ConfigError:
    return ConfigError(option, f"cannot write {place}: {exc.strerror}")
