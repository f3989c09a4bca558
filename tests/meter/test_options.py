from typing import Any

import pytest

from llmtap.errors import ConfigError
from llmtap.meter.options import MeterOptions
from llmtap.units import Duration


@pytest.mark.parametrize("admin", ["0.0.0.0:9464", "10.1.2.3:80", "[::]:9464", "gateway.internal:9464"])
def test_an_admin_port_that_others_reach_needs_a_token_and_tls(admin: str) -> None:
    token = {"admin": admin, "admin_token": "s3cret"}
    with pytest.raises(ConfigError, match=r"meter\.admin_token.*required"):
        MeterOptions(admin=admin)
    with pytest.raises(ConfigError, match=r"meter\.admin_tls_certificate.*required"):
        MeterOptions(**token)
    for more in ({"admin_plaintext": True}, {"admin_tls_certificate": "c.pem", "admin_tls_key": "k.pem"}):
        assert MeterOptions(**token, **more).admin == admin


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"admin_tls_certificate": "file.pem"}, "go together"),
        ({"admin_tls_key": "file.pem"}, "go together"),
        ({"admin_token": "  "}, r"meter\.admin_token"),
        ({"admin_token": "schlüssel"}, r"meter\.admin_token"),
        ({"window": Duration(90_000_000_000)}, r"meter\.window.*\n.*10s, 1m, 5m, 1h"),
        ({"refusal_patterns": ("default", "(unclosed")}, r"meter\.refusal_patterns\[1\]"),
        ({"buckets": {"ttft": ()}}, r"meter\.buckets\."),
        ({"buckets": {"ttft": (1.0, 0.5)}}, r"meter\.buckets\."),
        ({"buckets": {"gap": (0.0, 1.0)}}, r"meter\.buckets\."),
        ({"buckets": {"tpot": (1.0,)}}, r"meter\.buckets\."),
        ({"upstream_metrics": "host:8000/metrics"}, r"meter\.upstream_metrics"),
        ({"upstream_metrics": "ftp://h/metrics"}, r"meter\.upstream_metrics"),
        ({"upstream_metrics": "http:///metrics"}, r"meter\.upstream_metrics"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(options: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError, match=place) as caught:
        MeterOptions(**options)
    assert str(options.get("upstream_metrics")) not in str(caught.value)


def test_a_window_has_a_name_and_refusal_patterns_are_kept_left_out_and_added_to() -> None:
    assert MeterOptions(window=Duration(3_600_000_000_000)).window_name == "1h"
    ours = MeterOptions().patterns
    assert len(ours) > 3 and MeterOptions(refusal_patterns=()).patterns == ()
    (*kept, mine) = MeterOptions(refusal_patterns=("default", "^nope")).patterns
    assert tuple(kept) == ours and mine.match("Nope, not this")
