import msgspec
import pytest

from llmtap.errors import ConfigError
from llmtap.meter.options import CostOptions, MeterOptions, split_address
from llmtap.metrics.deadlines import Benefit
from llmtap.units import Duration, decode_special, encode_special


def test_the_defaults_are_those_of_the_design() -> None:
    options = MeterOptions()
    assert (options.admin, options.admin_token, options.window) == ("127.0.0.1:9464", None, 60_000_000_000)


def test_options_travel_between_processes() -> None:
    options = MeterOptions(admin="[::1]:0", window=Duration(10_000_000_000), priority="normal")
    line = msgspec.json.encode(options, enc_hook=encode_special)
    assert msgspec.json.decode(line, type=MeterOptions, dec_hook=decode_special) == options


def test_every_option_has_a_line_of_help() -> None:
    for field in msgspec.inspect.type_info(MeterOptions).fields:  # type: ignore[attr-defined]
        assert field.type.extra_json_schema["description"], field.name


@pytest.mark.parametrize("admin", ["0.0.0.0:9464", "10.1.2.3:80", "[::]:9464", "gateway.internal:9464"])
def test_an_admin_port_that_others_reach_wants_a_token(admin: str) -> None:
    with pytest.raises(ConfigError, match=r"meter\.admin_token.*required"):
        MeterOptions(admin=admin)
    with pytest.raises(ConfigError, match=r"meter\.admin_tls_certificate.*required"):
        MeterOptions(admin=admin, admin_token="s3cret")
    assert MeterOptions(admin=admin, admin_token="s3cret", admin_plaintext=True).admin == admin
    tls = {"admin_tls_certificate": "c.pem", "admin_tls_key": "k.pem"}
    assert MeterOptions(admin=admin, admin_token="s3cret", **tls).admin == admin


@pytest.mark.parametrize("one", ["admin_tls_certificate", "admin_tls_key"])
def test_a_certificate_and_its_key_go_together(one: str) -> None:
    with pytest.raises(ConfigError, match="go together"):
        MeterOptions(**{one: "file.pem"})  # type: ignore[arg-type]


@pytest.mark.parametrize("admin", ["127.0.0.1:9464", "127.9.9.9:1", "[::1]:9464", "localhost:9464"])
def test_loopback_needs_no_token(admin: str) -> None:
    assert MeterOptions(admin=admin).admin == admin


@pytest.mark.parametrize("token", ["", "  ", "schlüssel"])
def test_a_token_is_visible_ascii(token: str) -> None:
    with pytest.raises(ConfigError, match=r"meter\.admin_token"):
        MeterOptions(admin_token=token)


def test_a_window_is_one_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"meter\.window.*\n.*10s, 1m, 5m, 1h"):
        MeterOptions(window=Duration(90_000_000_000))
    assert MeterOptions(window=Duration(3_600_000_000_000)).window_name == "1h"


def test_our_words_of_a_refusal_can_be_kept_left_out_and_added_to() -> None:
    ours = MeterOptions().patterns
    assert len(ours) > 3
    assert MeterOptions(refusal_patterns=()).patterns == ()
    (*kept, mine) = MeterOptions(refusal_patterns=("default", "^nope")).patterns
    assert tuple(kept) == ours
    assert mine.match("Nope, not this")
    with pytest.raises(ConfigError, match=r"meter\.refusal_patterns\[1\].*no regular expression"):
        MeterOptions(refusal_patterns=("default", "(unclosed"))


def test_the_reader_is_who_the_options_say() -> None:
    assert MeterOptions().benefit == Benefit()
    benefit = MeterOptions(alpha=2.0, reader_tokens_per_second=10.0, idle_cost="tokens").benefit
    assert benefit == Benefit(2.0, 100_000_000, "tokens")


def test_without_a_price_there_is_none() -> None:
    assert CostOptions().price is None
    price = CostOptions(gpus=8, gpu_hour=2.5, input_million=0.1).price
    assert price is not None
    assert (price.gpus, price.per_gpu_hour, price.per_million_input) == (8, 2.5, 0.1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65_535)),
    ],
)
def test_an_address_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, "x") == expected


@pytest.mark.parametrize(
    "text", ["", "9464", ":9464", "::1:9464", "host:", "host:http", "host:65536", "h:-1"]
)
def test_what_is_no_address_names_its_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^meter\.admin: "):
        split_address(text, "meter.admin")
