"""`python -m llmtap.vantage.relay`: see process.py."""

import sys

from llmtap.vantage.relay.process import main

sys.exit(main())
