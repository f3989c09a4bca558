"""Entry point of a relay process: `python -m llmtap.vantage.relay`."""

import sys

from llmtap.vantage.relay.relay import main

sys.exit(main())
