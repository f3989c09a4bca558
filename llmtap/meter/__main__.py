"""Entry point of the meter process, `python -m llmtap.meter`; the program is in `process.py`."""

import sys

from llmtap.meter.process import main

sys.exit(main())
