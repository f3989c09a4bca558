"""Files are small, and every reader gets from them what was written."""

import os

import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from llmtap.capture.options import redact_url
from llmtap.capture.schema import SCHEMA, CaptureInfo, CaptureLedger, info_of
from llmtap.capture.store import parquet
from llmtap.capture.store.parquet import (
    LocalPlace,
    PlaceError,
    RemotePlace,
    place_of,
    write_parquet,
)
from llmtap.errors import ConfigError
from tests.support.storage import capture_rows

_INFO = CaptureInfo(
    capture="c1",
    level="shape",
    tokenizer="gpt-4o",
    ledger=CaptureLedger(dropped={"memory": 2}),
    damaged={"batches": 1},
)


def _batches(*sizes, tokens=6):
    starts = [1 + sum(sizes[:i]) for i in range(len(sizes))]
    return [
        capture_rows.batch(n, seed=i, start=start, tokens=tokens)
        for i, (n, start) in enumerate(zip(sizes, starts, strict=True))
    ]


def _full():
    """Rows of the level `full` and rows that are all null."""
    text = 'Grüße,\n"you" 🙂\0' * 3
    return pa.RecordBatch.from_pylist(
        [{"id": "a", "request_body": text, "event_us": []}, {}, {"id": "b", "blocks": [-(1 << 63), None]}],
        schema=SCHEMA,
    )


def test_pyarrow_reads_equal_rows_columns_and_the_files_own_words(tmp_path):
    path = tmp_path / "a.parquet"
    batches = [*_batches(5, 3, 0, 7), _full()]
    assert write_parquet(path, _INFO, batches) == 18
    table = pq.read_table(path)
    assert table.equals(pa.Table.from_batches(batches))
    assert table.schema.equals(SCHEMA)
    assert info_of(pq.read_schema(path)) == _INFO
    assert info_of(pa.dataset.dataset(path).schema) == _INFO


def test_no_column_has_a_type_or_an_encoding_that_older_readers_lack(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, _INFO, _batches(50))
    meta = pq.read_metadata(path)
    group = meta.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    assert {c.physical_type for c in columns} <= {"BYTE_ARRAY", "INT32", "INT64", "BOOLEAN", "DOUBLE"}
    assert {e for c in columns for e in c.encodings} <= {"PLAIN", "RLE", "RLE_DICTIONARY", "PLAIN_DICTIONARY"}
    assert {c.compression for c in columns} == {"ZSTD"}
    classes = next(c for c in columns if c.path_in_schema.startswith("event_class"))
    assert classes.has_dictionary_page


def test_statistics_hold_what_one_filters_by_and_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, _INFO, [*_batches(20), _full()])
    group = pq.read_metadata(path).row_group(0)
    found = {
        group.column(i).path_in_schema
        for i in range(group.num_columns)
        if group.column(i).is_stats_set and group.column(i).statistics.has_min_max
    }
    assert {"arrival", "arrival_ns", "tenant", "model", "status", "outcome"} <= found
    assert not found & {"request_body", "response_text", "usage", "path", "error"}


def test_rows_keep_their_order_and_row_groups_stay_small(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    batches = _batches(*[10] * 12)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 4 * batches[0].nbytes)
    read = 0

    def counted():
        nonlocal read
        for read, batch in enumerate(batches, 1):  # noqa: B007
            yield batch

    write_parquet(path, _INFO, counted())
    meta = pq.read_metadata(path)
    assert read == 12
    assert meta.num_row_groups in (3, 4)
    assert max(meta.row_group(i).num_rows for i in range(meta.num_row_groups)) <= 50
    assert pq.read_table(path, columns=["seq"])["seq"].to_pylist() == list(range(1, 121))


def test_a_file_without_rows_still_says_what_it_knows(tmp_path):
    path = tmp_path / "a.parquet"
    assert write_parquet(path, _INFO, []) == 0
    assert pq.read_table(path).num_rows == 0
    assert info_of(pq.read_schema(path)) == _INFO
    with duckdb.connect() as db:
        assert db.execute("SELECT count(*) FROM read_parquet(?)", [str(path)]).fetchone() == (0,)
    assert polars.read_parquet(path).height == 0


def test_events_take_three_bytes_and_exchanges_four_hundred_beside_them(tmp_path):
    path = tmp_path / "a.parquet"
    n = 1_000
    batch = capture_rows.batch(n, seed=11, tokens=200)
    write_parquet(path, _INFO, [batch])
    events = sum(len(us) for us in batch.column("event_us").to_pylist())
    group = pq.read_metadata(path).row_group(0)
    event_bytes = sum(
        group.column(i).total_compressed_size
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.startswith("event_")
    )
    assert event_bytes / events <= 3.0
    assert (path.stat().st_size - event_bytes) / n <= 400


_KEY, _SECRET = "AKIAPLANTED", "wJalr/XU+tn=FEMI"


@pytest.mark.parametrize(
    "url, shown",
    [
        ("captures", "captures"),
        ("/var/lib/a@b", "/var/lib/a@b"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        (f"s3://{_KEY}:{_SECRET}@bucket/p", "s3://***@bucket/p"),
        ("s3://a:b@c@bucket/p", "s3://***@bucket/p"),
        (
            f"s3://{_KEY}:x@b/p?region=eu-west-1&endpoint_override=localhost:9000",
            "s3://***@b/p?region=eu-west-1&endpoint_override=localhost:9000",
        ),
        ("s3://b/p?endpoint_override=http://u:pw@h:1", "s3://b/p?endpoint_override=http://***@h:1"),
        ("abfs://c@acc.dfs.core.windows.net/x?sig=planted", "abfs://***@acc.dfs.core.windows.net/x?sig=***"),
        ("gs://b/x?access_token=planted&project_id=p", "gs://b/x?access_token=***&project_id=p"),
    ],
)
def test_what_is_shown_of_a_url_holds_no_secret(url, shown):
    assert redact_url(url) == shown


@pytest.mark.parametrize("to", ["{}", "file://{}"])
def test_a_folder_may_be_a_path_or_a_file_url(tmp_path, to):
    folder = tmp_path / "with space"
    place = place_of(to.format(folder).replace(" ", "%20" if to.startswith("file") else " "))
    assert place.folder == folder
    assert isinstance(place, LocalPlace)


def test_a_local_file_is_moved_to_its_name_and_takes_the_place_of_an_older_try(tmp_path):
    place = LocalPlace(tmp_path)
    for content in (b"first", b"second"):
        made = tmp_path / ".x.parquet.tmp"
        made.write_bytes(content)
        place.put(made, "x.parquet")
        assert not made.exists()
    assert (tmp_path / "x.parquet").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["x.parquet"]


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        f"s3://{_KEY}:{_SECRET}@b ad/p",
        f"s3://{_KEY}:{_SECRET}@b/p?regoin=x",
        f"nosuch://{_KEY}:secret@host/p",
        "gs://",
    ],
)
def test_a_url_that_cannot_be_is_told_without_its_secrets(url):
    with pytest.raises(ConfigError) as caught:
        place_of(url)
    text = str(caught.value)
    assert text.startswith("capture.to: ")
    assert not any(secret in text for secret in (_KEY, _SECRET, "secret@", "wJalr"))


@pytest.mark.parametrize("to", ["s3:/bucket/x", f"s3:/{_KEY}:{_SECRET}@bucket/x", "file:/var/x"])
def test_a_url_that_lacks_a_slash_is_no_folder(to):
    with pytest.raises(ConfigError) as caught:
        place_of(to)
    assert caught.value.place == "capture.to"
    assert _KEY not in str(caught.value)


@pytest.mark.parametrize("to", ["a:b", "./s3:/x", "x/y:/z", "s3", "s3/x", "c:/x"])
def test_a_colon_is_no_url(to):
    assert isinstance(place_of(to), LocalPlace)


def test_a_place_that_does_not_take_a_file_is_one_sentence_without_secrets(tmp_path):
    made = tmp_path / "made"
    made.write_bytes(b"x")
    url = f"s3://{_KEY}:{_SECRET}@bucket/p?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    for place, named in (
        (place_of(url), "x.parquet cannot be uploaded to s3://***@bucket/p"),
        (LocalPlace(tmp_path / "gone"), f"{tmp_path}/gone/x.parquet cannot be written: No such file"),
    ):
        with pytest.raises(PlaceError) as caught:
            place.put(made, "x.parquet")
        text = str(caught.value)
        assert text.startswith(named)
        assert not any(part in text for part in ("\n", _KEY, "wJalr"))
        assert made.exists(), "for another try"


def test_a_store_that_pyarrow_knows_by_itself_takes_files_too(tmp_path):
    made = tmp_path / "made"
    made.write_bytes(b"12345")
    place = place_of("mock:///folder")
    assert isinstance(place, RemotePlace)
    for content in (b"12345", b"again"):
        made.write_bytes(content)
        place.put(made, "x.parquet")
        with place.filesystem().open_input_file("folder/x.parquet") as file:
            assert file.read() == content
