import pyarrow as pa
import pytest

from llmtap.capture.options import CaptureOptions
from llmtap.capture.schema import VERSION, CaptureVersionError, migrate
from llmtap.config import load_settings
from llmtap.errors import ConfigError

_NOW = pa.schema([("id", pa.string()), ("wait_us", pa.int64()), ("tenant", pa.string())])


def test_a_batch_of_an_older_version_has_nulls_for_the_columns_that_it_lacks() -> None:
    out = migrate(pa.RecordBatch.from_pydict({"tenant": ["t"], "gone": [1]}), VERSION - 1, schema=_NOW)
    assert out.schema == _NOW
    assert out.to_pydict() == {"id": [None], "wait_us": [None], "tenant": ["t"]}


def test_a_column_of_a_narrower_type_is_widened():
    batch = pa.RecordBatch.from_arrays([pa.array([5], pa.int32())], names=["wait_us"])
    assert migrate(batch, VERSION, schema=_NOW).column("wait_us").to_pylist() == [5]


def test_a_value_that_does_not_fit_is_an_error_and_not_another_value():
    batch = pa.RecordBatch.from_arrays([pa.array(["soon"])], names=["wait_us"])
    with pytest.raises(pa.ArrowInvalid):
        migrate(batch, VERSION, schema=_NOW)


def test_a_newer_version_is_refused():
    batch = pa.RecordBatch.from_pydict({"id": ["a"]})
    with pytest.raises(CaptureVersionError, match=rf"x\.spool: has schema version {VERSION + 1}") as caught:
        migrate(batch, VERSION + 1, where="x.spool")
    assert caught.value.version == VERSION + 1


S = 1_000_000_000


@pytest.mark.parametrize(
    "rule, hint",
    [
        ("Email", "did you mean 'email'?"),
        (r"ACME-\d+", r"for a regular expression, write 're:ACME-\\d+'"),
        ("re:(", "write re: and a regular expression of Python, such as re:[0-9]{8}"),
        ("re:", "write re: and a regular expression of Python, such as re:[0-9]{8}"),
    ],
)
def test_a_rule_that_is_neither_is_refused_before_it_redacts_nothing(rule, hint):
    with pytest.raises(ConfigError) as caught:
        CaptureOptions(redact=("key", rule))
    assert (caught.value.place, caught.value.hint) == ("capture.redact[1]", hint)


def test_rows_are_in_the_spool_within_ten_seconds_at_most():
    assert load_settings(None, {}, {"capture.flush": "10s"}).capture.flush == 10 * S
    with pytest.raises(ConfigError, match=r"capture\.flush \(command line\): must be at most 10 s"):
        load_settings(None, {}, {"capture.flush": "10.001s"})
