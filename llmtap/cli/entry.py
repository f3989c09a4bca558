"""Entry point of the command; exits cleanly on Ctrl-C during imports, too.

Python takes half a second to read what the command needs. A Ctrl-C in that time would show where it was, line
by line, and could be lost in code that swallows exceptions: until it is over the process just ends.
"""

import os
import signal
from types import FrameType
from typing import Final

__all__ = ["main"]

_EXIT: Final = 128
"""What a shell adds to a signal's number."""


def main() -> None:
    """`llmtap`. Exits as `llmtap.cli.main` says, and with 130 where Ctrl-C came before it could."""
    # Who was started with it ignored goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from llmtap.cli.main import load_commands
    from llmtap.cli.main import main as run

    load_commands()
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(_EXIT + number)  # nothing is open yet that would have to be closed
