"""Label of a request: whether its sender expects a refusal (`x-llmtap-label`, or a column of a trace).

The relay and the ASGI middleware remove the field from the request, so that a guardrail cannot see it. A
label does not change the measurement: `metrics/refusals.py` only compares it with the outcome. A value that
is not one of EXPECTED becomes UNKNOWN, and is never stored.
"""

from typing import Final

LABEL_FIELD: Final = b"x-llmtap-label"
"""Header field of the label, in lower case. Its compiled twin is in `native/heads.c`."""
SHOULD_REFUSE: Final = "should-refuse"
SHOULD_ANSWER: Final = "should-answer"
EXPECTED: Final = (SHOULD_ANSWER, SHOULD_REFUSE)
UNKNOWN: Final = "unknown"
"""The request has a label whose value is not one of EXPECTED."""
NOT_ACCEPTED: Final = "not-accepted"
"""The request has a label, but its tenant is not one of `meter.label_tenants`."""


def label_of(value: str | None) -> str | None:
    """Return the label for the value of a field or column; None if there is no field."""
    if value is None:
        return None
    return value if value in EXPECTED else UNKNOWN
