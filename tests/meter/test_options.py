import pytest

from llmtap.errors import ConfigError
from llmtap.meter.options import MeterOptions
from llmtap.units import Duration


@pytest.mark.parametrize("admin", ["0.0.0.0:9464", "10.1.2.3:80", "[::]:9464", "gateway.internal:9464"])
def test_an_admin_port_that_others_reach_wants_a_token(admin: str) -> None:
    with pytest.raises(ConfigError, match=r"meter\.admin_token.*required"):
        MeterOptions(admin=admin)
    with pytest.raises(ConfigError, match=r"meter\.admin_tls_certificate.*required"):
        MeterOptions(admin=admin, admin_token="s3cret")
    assert MeterOptions(admin=admin, admin_token="s3cret", admin_plaintext=True).admin == admin
    tls = {"admin_tls_certificate": "c.pem", "admin_tls_key": "k.pem"}
    assert MeterOptions(admin=admin, admin_token="s3cret", **tls).admin == admin


@pytest.mark.parametrize(
    ("one", "other"),
    [("admin_tls_certificate", "admin_tls_key"), ("admin_tls_key", "admin_tls_certificate")],
)
def test_a_certificate_and_its_key_go_together(one: str, other: str) -> None:
    with pytest.raises(ConfigError, match=rf"meter\.{one}: is set, but meter\.{other} is missing"):
        MeterOptions(**{one: "file.pem"})  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["", "  ", "schlüssel"])
def test_a_token_is_visible_ascii(token: str) -> None:
    with pytest.raises(ConfigError, match=r"meter\.admin_token"):
        MeterOptions(admin_token=token)


def test_a_window_is_one_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"meter\.window.*\n.*10s, 1m, 5m, 1h"):
        MeterOptions(window=Duration(90_000_000_000))
    assert MeterOptions(window=Duration(3_600_000_000_000)).window_name == "1h"


def test_a_silence_lasts_for_some_time() -> None:
    with pytest.raises(ConfigError, match=r"meter\.silence_threshold"):
        MeterOptions(silence_threshold=Duration(0))


def test_our_words_of_a_refusal_can_be_kept_left_out_and_added_to() -> None:
    ours = MeterOptions().refusal_signs.patterns
    assert len(ours) > 3
    assert MeterOptions(refusal_patterns=()).refusal_signs.patterns == ()
    (*kept, mine) = MeterOptions(refusal_patterns=("default", "^nope")).refusal_signs.patterns
    assert MeterOptions(refusal_errors=("Policy_Violation",)).refusal_signs.error_types == {
        "policy_violation"
    }
    assert tuple(kept) == ours
    assert mine.regex.match("Nope, not this")
    with pytest.raises(ConfigError, match=r"meter\.refusal_patterns\[1\].*not a regular expression"):
        MeterOptions(refusal_patterns=("default", "(unclosed"))


@pytest.mark.parametrize(
    "buckets", [{"ttft": ()}, {"ttft": (1.0, 0.5)}, {"gap": (0.0, 1.0)}, {"tpot": (1.0,)}], ids=str
)
def test_edges_of_buckets_ascend_and_are_of_a_known_kind(buckets: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"meter\.buckets\."):
        MeterOptions(buckets=buckets)


@pytest.mark.parametrize("url", ["host:8000/metrics", "ftp://h/metrics", "http:///metrics"])
@pytest.mark.parametrize("field", ["upstream_metrics", "trace_url"])
def test_an_address_is_one_of_http_and_is_not_repeated(field: str, url: str) -> None:
    with pytest.raises(ConfigError, match=rf"meter\.{field}") as caught:
        MeterOptions(**{field: url})
    assert url not in str(caught.value)


def test_the_address_of_a_trace_has_the_place_of_the_id() -> None:
    with pytest.raises(ConfigError, match=r"meter\.trace_url.*\{trace_id\}"):
        MeterOptions(trace_url="https://traces.example/")
