"""Entry point of a process that sends load (`python -m llmtap.load`)."""

import sys

from llmtap.load.workers.worker import main

sys.exit(main())
