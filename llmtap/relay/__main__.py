"""`python -m llmtap.relay`: see process.py."""

import sys

from llmtap.relay.process import main

sys.exit(main())
