import os

import pytest

from llmtap.capture.store.parquet import LocalPlace, PlaceError, RemotePlace, open_place, redacted
from llmtap.errors import ConfigError

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
    assert redacted(url) == shown


@pytest.mark.parametrize("to", ["{}", "file://{}"])
def test_a_folder_may_be_a_path_or_a_file_url(tmp_path, to):
    folder = tmp_path / "with space"
    place = open_place(to.format(folder).replace(" ", "%20" if to.startswith("file") else " "))
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
    ["s3://", f"s3://{_KEY}:{_SECRET}@b ad/p", f"s3://{_KEY}:{_SECRET}@b/p?regoin=x",
     f"nosuch://{_KEY}:secret@host/p", "gs://"],
)  # fmt: skip
def test_a_url_that_cannot_be_is_told_without_its_secrets(url):
    with pytest.raises(ConfigError) as caught:
        open_place(url)
    text = str(caught.value)
    assert text.startswith("capture.to: ")
    assert not any(secret in text for secret in (_KEY, _SECRET, "secret@", "wJalr"))


@pytest.mark.parametrize("to", ["s3:/bucket/x", f"s3:/{_KEY}:{_SECRET}@bucket/x", "file:/var/x"])
def test_a_url_that_lacks_a_slash_is_no_folder(to):
    with pytest.raises(ConfigError) as caught:
        open_place(to)
    assert caught.value.place == "capture.to"
    assert _KEY not in str(caught.value)


@pytest.mark.parametrize("to", ["a:b", "./s3:/x", "x/y:/z", "s3", "s3/x", "c:/x"])
def test_a_colon_is_no_url(to):
    assert isinstance(open_place(to), LocalPlace)


def test_a_place_that_does_not_take_a_file_is_one_sentence_without_secrets(tmp_path):
    made = tmp_path / "made"
    made.write_bytes(b"x")
    url = f"s3://{_KEY}:{_SECRET}@bucket/p?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    for place, named in (
        (open_place(url), "x.parquet to s3://***@bucket/p"),
        (LocalPlace(tmp_path / "gone"), f"{tmp_path}/gone/x.parquet: No such file or directory"),
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
    place = open_place("mock:///folder")
    assert isinstance(place, RemotePlace)
    for content in (b"12345", b"again"):
        made.write_bytes(content)
        place.put(made, "x.parquet")
        with place.store().open_input_file("folder/x.parquet") as file:
            assert file.read() == content
