"""`python -m llmtap.cli`: run the command without an installed script."""

from llmtap.cli.entry import main

main()
