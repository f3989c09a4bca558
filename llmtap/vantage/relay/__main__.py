"""`python -m llmtap.vantage.relay`: see relay.py."""

import sys

from llmtap.vantage.relay.relay import main

sys.exit(main())
