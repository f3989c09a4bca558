"""A sending process."""

import sys

from llmtap.load.worker import main

sys.exit(main())
