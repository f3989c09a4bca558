"""Entry point of the `llmtap` command, and of `python -m llmtap.cli`: `main` of `cli/main.py`.

Python needs half a second to import the commands; a Ctrl-C in that time must not print a traceback.
"""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130, during the imports as well as later."""
    try:
        from llmtap.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
