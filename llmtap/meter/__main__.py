"""`python -m llmtap.meter`: see process.py."""

import sys

from llmtap.meter.process import main

sys.exit(main())
