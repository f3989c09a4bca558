"""Entry point of the watcher process: `python -m llmtap.vantage.passive`."""

import sys

from llmtap.vantage.passive.watcher import main

sys.exit(main())
