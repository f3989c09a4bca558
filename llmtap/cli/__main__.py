"""Entry point of the `llmtap` command, and of `python -m llmtap.cli`.

Python needs half a second to import the commands. A Ctrl-C in that time would print a traceback, or be lost
in code that swallows exceptions. So the process simply exits on Ctrl-C until the imports are done; then it
calls `main` of `cli/main.py`.
"""

import os
import signal
from types import FrameType
from typing import Final

_EXIT: Final = 128
"""What a shell adds to the number of a signal."""


def main() -> None:
    """Run the command line. Exits as `llmtap.cli.main` does, or with 130 on Ctrl-C during the imports."""
    # A process that was started with SIGINT ignored continues to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from llmtap.cli.main import load_commands
    from llmtap.cli.main import main as run

    load_commands()
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(_EXIT + number)  # nothing is open yet


if __name__ == "__main__":
    main()
