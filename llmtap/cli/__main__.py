"""`python -m llmtap.cli`: the command, also where no script is installed."""

from llmtap.cli.entry import main

main()
