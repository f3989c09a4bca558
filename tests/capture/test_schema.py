import pyarrow as pa
import pytest

from llmtap.capture import schema
from llmtap.capture.schema import VERSION, CaptureVersionError, migrate

_NOW = pa.schema([("id", pa.string()), ("wait_us", pa.int64()), ("tenant", pa.string())])


def _seconds_become_us(batch: pa.RecordBatch) -> pa.RecordBatch:
    us = [None if s is None else round(s * 1e6) for s in batch.column("wait_s").to_pylist()]
    return batch.append_column("wait_us", pa.array(us, pa.int64()))


def _names_become_ids(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.rename_columns(["id" if name == "name" else name for name in batch.schema.names])


_CHAIN = {1: _names_become_ids, 3: _seconds_become_us}
"""Version 2 to 3 only added `tenant`: it needs no step."""


@pytest.mark.parametrize(
    "version, columns, expected",
    [
        (
            1,
            {"name": ["a", "b"], "wait_s": [0.5, None]},
            {"id": ["a", "b"], "wait_us": [500_000, None], "tenant": [None, None]},
        ),
        (2, {"id": ["a"], "wait_s": [2.0]}, {"id": ["a"], "wait_us": [2_000_000], "tenant": [None]}),
        (
            3,
            {"id": ["a"], "wait_s": [2.0], "tenant": ["t"]},
            {"id": ["a"], "wait_us": [2_000_000], "tenant": ["t"]},
        ),
        (
            4,
            {"tenant": ["t"], "id": ["a"], "wait_us": [7]},
            {"id": ["a"], "wait_us": [7], "tenant": ["t"]},
        ),
    ],
)
def test_a_batch_of_any_older_version_goes_through_all_steps_from_its_own(
    version, columns, expected, monkeypatch
):
    monkeypatch.setattr(schema, "STEPS", _CHAIN)
    monkeypatch.setattr(schema, "VERSION", 4)
    out = migrate(pa.RecordBatch.from_pydict(columns), version, schema=_NOW)
    assert out.schema == _NOW
    assert out.to_pydict() == expected


def test_a_column_of_a_narrower_type_is_widened():
    batch = pa.RecordBatch.from_arrays([pa.array([5], pa.int32())], names=["wait_us"])
    assert migrate(batch, VERSION, schema=_NOW).column("wait_us").to_pylist() == [5]


def test_a_value_that_does_not_fit_is_an_error_and_not_another_value():
    batch = pa.RecordBatch.from_arrays([pa.array(["soon"])], names=["wait_us"])
    with pytest.raises(pa.ArrowInvalid):
        migrate(batch, VERSION, schema=_NOW)


def test_a_newer_version_is_refused():
    batch = pa.RecordBatch.from_pydict({"id": ["a"]})
    with pytest.raises(CaptureVersionError, match=rf"x\.spool: schema version {VERSION + 1}") as caught:
        migrate(batch, VERSION + 1, where="x.spool")
    assert caught.value.version == VERSION + 1
