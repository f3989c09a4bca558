"""Entry point of a process that sends load (`python -m llmtap.load`): calls `workers/worker.py`."""

import sys

from llmtap.load.workers.worker import main

sys.exit(main())
