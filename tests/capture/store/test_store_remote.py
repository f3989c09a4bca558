"""An object store that is slow, fails, hangs or is gone: uploads resume, and each row is there once."""

import logging

import pytest

from llmtap.capture.read.reader import read
from llmtap.capture.store import finisher, parquet
from llmtap.capture.store.parquet import RemotePlace, place_of
from llmtap.capture.store.store import NOTES_BYTES, spool_folder
from llmtap.units import Bytes
from tests.support.servers.object_store import Wire, object_store
from tests.support.storage.stores import NOTHING, append, fat, options, store, thin
from tests.support.waiting import block_until

_KEY, _SECRET = "AKIAPLANTED", "planted/secret+key"


@pytest.fixture(scope="module")
def server():
    with object_store("bucket") as port:
        yield port


@pytest.fixture
def wire(server):
    carried = Wire(server)
    yield carried
    carried.cut()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch, tmp_path):
    monkeypatch.setattr(finisher, "BACK_OFF_S", 0.05)
    monkeypatch.setattr(finisher, "BACK_OFF_S_MAX", 0.2)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def _url(port, prefix):
    return (
        f"s3://{_KEY}:{_SECRET.replace('/', '%2F')}@bucket/{prefix}"
        f"?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    )


def _there(port, prefix):
    """Name and `seq` of rows of each object, as a reader of the capture finds them."""
    url = _url(port, prefix)
    names = [file.name for file in read(url).files]
    assert not any(_KEY in name or "planted" in name for name in names)
    return [
        (
            name.partition("?")[0].rpartition("/")[2],
            read(f"{base}/{leaf}?{query}").table(["seq"])["seq"].to_pylist(),
        )
        for name in names
        for base, query in [url.split("?")]
        for leaf in [name.partition("?")[0].rpartition("/")[2]]
    ]


def _rows(found):
    return sorted(seq for _, seqs in found for seq in seqs)


def _spools(url):
    return sorted(p.name for p in spool_folder(options(url)).iterdir() if p.suffix == ".spool")


def test_a_file_of_many_parts_arrives_whole(server, wire, tmp_path):
    place = place_of(_url(wire.port, "parts"))
    made = tmp_path / "made"
    made.write_bytes(bytes(range(256)) * (25 << 12))
    place.put(made, "big")
    assert isinstance(place, RemotePlace)
    with place.filesystem().open_input_file("bucket/parts/big") as file:
        assert file.read() == made.read_bytes()


@pytest.mark.parametrize("fault", ["503", "gone"])
def test_what_a_failing_store_does_not_take_waits_and_is_there_once_in_the_end(server, wire, caplog, fault):
    caplog.set_level(logging.DEBUG)
    url = _url(wire.port, f"fails-{fault}")
    at = store(url)
    append(at, thin(1))
    at.rotate()
    block_until(lambda: at.state().files == 1)
    if fault == "503":
        wire.answer_503 = True
    else:
        wire.cut()
    for start in (6, 11, 16):
        append(at, thin(start))
        at.rotate()
    block_until(lambda: at.state().failures >= 3)
    state = at.state()
    assert (state.files, state.files_waiting, state.problem, len(_spools(url))) == (1, 3, None, 3)
    if fault == "503":
        wire.answer_503 = False
    else:
        wire.connect()
    block_until(lambda: at.state().files == 4)
    assert at.state().files_problem is None
    at.close(100)
    found = _there(server, f"fails-{fault}")
    assert (_rows(found), len(found)) == (list(range(1, 21)), 4)
    assert all(name.startswith("llmtap-") and name.endswith(".parquet") for name, _ in found)
    assert (_spools(url), at.state().local_bytes) == ([], 0)
    assert caplog.text.count("event=capture_files_wait") == 1, "once, however often it is tried"
    assert caplog.text.count("event=capture_files_resumed") == 1
    assert not any(key in caplog.text + (state.files_problem or "") for key in (_KEY, "planted"))


def test_an_upload_that_the_store_kept_and_did_not_confirm_goes_to_the_same_name(server, wire, monkeypatch):
    """The put gets through, the answer to the question for its size does not."""
    at = store(_url(wire.port, "unsure"))
    real, failed = RemotePlace._upload, []

    def lost(store_, made, path):
        size = real(store_, made, path)
        if not failed:
            failed.append(path)
            raise OSError("the connection was cut before the answer came")
        return size

    monkeypatch.setattr(RemotePlace, "_upload", staticmethod(lost))
    append(at, thin(1))
    at.close(0)
    again = store_again(at, wire, "unsure")
    again.close(100)
    found = _there(server, "unsure")
    assert len(failed) == 1
    assert len(found) == 1
    assert _rows(found) == [1, 2, 3, 4, 5]


def store_again(at, wire, prefix):
    """The next start, once the first has let go of the folder."""
    block_until(lambda: not at._finisher._thread.is_alive())
    at.close(1)
    return store(_url(wire.port, prefix))


def test_a_dead_store_fills_the_spool_to_its_bound_and_then_capture_pauses(server, wire):
    wire.cut()
    url = _url(wire.port, "bound")
    bound = 256 << 10
    at = store(url, total_bytes=Bytes(bound), when_full="oldest")
    seq = 1
    while at.append(fat(seq), NOTHING):
        seq += 1
    state = at.state()
    assert (at.problem, state.files_deleted) == ("total_bytes", 0)
    assert bound - NOTES_BYTES - 40_000 <= state.spool_bytes <= bound
    assert state.local_bytes == state.spool_bytes
    wire.connect()
    block_until(lambda: at.append(fat(seq), NOTHING))
    assert at.problem is None
    at.close(100)
    assert _rows(_there(server, "bound")) == list(range(1, seq + 1))


def test_a_store_that_hangs_holds_up_neither_rows_nor_the_end(server, wire, monkeypatch, caplog):
    monkeypatch.setattr(parquet, "REQUEST_TIMEOUT_S", 0.4)
    wire.hang = True
    url = _url(wire.port, "hangs")
    at = store(url)
    append(at, thin(1))
    at.rotate()
    block_until(lambda: wire.refused > 0)
    append(at, thin(6))
    at.close(0.05)
    assert at.state().files_waiting == 2
    assert f"event=capture_files_left spools=2 spool={spool_folder(options(url))}" in caplog.text
    # Its time-out ends the upload without anybody's help.
    block_until(lambda: not at._finisher._thread.is_alive())
    assert at.state().failures >= 1
    wire.hang = False
    again = store_again(at, wire, "hangs")
    again.close(100)
    assert again.state().recovered == 10
    assert _rows(_there(server, "hangs")) == list(range(1, 11))
