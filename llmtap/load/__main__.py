"""Entry point of a sending process."""

import sys

from llmtap.load.workers.worker import main

sys.exit(main())
