from pathlib import Path

import pytest

from llmtap.config import load_settings
from llmtap.errors import ConfigError
from llmtap.export.options import OtlpOptions

STANDARD = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4317",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
}


def test_the_standard_variables_count_where_nothing_of_ours_speaks(tmp_path: Path) -> None:
    otlp = load_settings(None, STANDARD, {}).otlp
    assert (otlp.endpoint, otlp.protocol) == ("https://collector:4317", "http/protobuf")
    file = tmp_path / "llmtap.toml"
    file.write_text("[otlp]\nendpoint = 'http://other:1'\n")
    otlp = load_settings(file, STANDARD, {}).otlp
    assert (otlp.endpoint, otlp.protocol) == ("http://other:1", "http/protobuf")
    otlp = load_settings(file, {**STANDARD, "LLMTAP_OTLP_ENDPOINT": ""}, {}).otlp
    assert otlp.endpoint == "", "switched off for good"
    own = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:4317"}
    assert not otlp.is_enabled(own) and OtlpOptions().is_enabled(own) and not OtlpOptions().is_enabled({})
    assert load_settings(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {}).otlp.endpoint is None


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"endpoint": "127.0.0.1:4317"}, "otlp.endpoint"),
        ({"endpoint": "http://"}, "otlp.endpoint"),
        ({"endpoint": "http://[x"}, "otlp.endpoint"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError) as told:
        OtlpOptions(**options)  # type: ignore[arg-type]
    assert told.value.place == place
