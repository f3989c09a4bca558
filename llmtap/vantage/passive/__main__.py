"""`python -m llmtap.vantage.passive`: see watcher.py."""

import sys

from llmtap.vantage.passive.watcher import main

sys.exit(main())
