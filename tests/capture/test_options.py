"""What cannot be is refused by the name of its key, with what was meant."""

import pytest

from llmtap.capture.options import CaptureOptions
from llmtap.errors import ConfigError
from llmtap.units import Duration

S = 1_000_000_000


@pytest.mark.parametrize(
    "rules", [(), ("email",), ("key", "phone", "card", "email"), (r"re:ACME-\d+", "email"), ("re:email",)]
)
def test_rules_are_names_and_marked_patterns(rules):
    assert CaptureOptions(redact=rules).redact == rules


@pytest.mark.parametrize(
    "rule, problem, hint",
    [
        ("emial", "expected one of email, card, phone, key", "did you mean 'email'?"),
        ("Email", "expected one of email, card, phone, key", "did you mean 'email'?"),
        ("cards", "expected one of email, card, phone, key", "did you mean 'card'?"),
        ("ssn", "expected one of email, card, phone, key", "a regular expression is written 're:ssn'"),
        (r"ACME-\d+", "expected one of", r"a regular expression is written 're:ACME-\\d+'"),
        ("re:(", "'(' is no regular expression", None),
        ("re:", "has no pattern", None),
    ],
)
def test_a_rule_that_is_neither_is_refused_before_it_redacts_nothing(rule, problem, hint):
    with pytest.raises(ConfigError) as caught:
        CaptureOptions(redact=("key", rule))
    assert caught.value.place == "capture.redact[1]"
    assert problem in caught.value.problem
    assert caught.value.hint == hint


def test_rows_are_in_the_spool_within_ten_seconds_at_most():
    assert CaptureOptions(flush=Duration(10 * S)).flush == 10 * S
    with pytest.raises(ConfigError, match=r"capture\.flush: must be at most 10 s"):
        CaptureOptions(flush=Duration(10 * S + 1))
