"""`python -m llmtap.cli`: the command, also where no script is installed."""

from llmtap.cli.main import main

main()
