"""Entry point of the `llmtap` command, and of `python -m llmtap.cli`: `main` of `cli/main.py`.

Python needs half a second to import the commands; a Ctrl-C in that time must not print a traceback.
"""

import sys


def main() -> None:
    """Run the command line. A Ctrl-C during the imports ends it with the same exit code as later."""
    try:
        from llmtap.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
