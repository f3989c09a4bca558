"""What cannot be is refused by the name of its key, with what was meant."""

import pytest

from llmtap.capture.options import CaptureOptions
from llmtap.errors import ConfigError
from llmtap.units import Duration

S = 1_000_000_000


@pytest.mark.parametrize(
    "rule, hint",
    [
        ("Email", "did you mean 'email'?"),
        (r"ACME-\d+", r"a regular expression is written 're:ACME-\\d+'"),
        ("re:(", None),
        ("re:", None),
    ],
)
def test_a_rule_that_is_neither_is_refused_before_it_redacts_nothing(rule, hint):
    with pytest.raises(ConfigError) as caught:
        CaptureOptions(redact=("key", rule))
    assert (caught.value.place, caught.value.hint) == ("capture.redact[1]", hint)


def test_rows_are_in_the_spool_within_ten_seconds_at_most():
    assert CaptureOptions(flush=Duration(10 * S)).flush == 10 * S
    with pytest.raises(ConfigError, match=r"capture\.flush: must be at most 10 s"):
        CaptureOptions(flush=Duration(10 * S + 1))
