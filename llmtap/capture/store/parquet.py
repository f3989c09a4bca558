"""Write Parquet files of captures, and deliver them to a local folder or an object store.

`finisher.py` makes files of the meter's spools with `write_parquet`. Replays, benchmarks and simulations add
their exchanges to a `RunWriter`. `place_of` returns the `CapturePlace` of a path or a URL, whose `put` stores
a file. A URL can contain credentials (`s3://access:secret@bucket/...`): no message and no log line shows them
(`redact_url`).

The encodings are chosen by measurements with streams of 200 tokens about 20 ms apart (jitter 1 to 2 ms),
8,000 exchanges in one row group, zstd level 3, bytes per event:

    column         PLAIN   dictionary   DELTA_BINARY_PACKED   BYTE_STREAM_SPLIT
    event_us       2.32    2.50         2.71                  2.14
    event_bytes    0.51    0.41         0.81                  0.46
    event_class    0.002   0.0004       -                     -
    event_tokens   0.014   0.0002       0.0003                0.001
    event_flags    0.010   0.0002       0.0003                0.001

BYTE_STREAM_SPLIT would save 8 %, but few readers support it for integers (SPARK-56894); DELTA needs Spark
3.3. So columns are PLAIN, or have a dictionary if values repeat: 2.73 bytes per event, and 109 per exchange
for all other columns. zstd level 1 costs 2 % more bytes, level 9 costs 9 % more and five times the CPU.

The footer of 8 KB has statistics only of the columns by which readers filter. Statistics of all columns would
take 3 KB more and contain users' text. A copy of the Arrow schema would take 8 KB more.

A `RunWriter` writes Parquet files without a spool, because a killed replay, benchmark or simulation is
repeated. Each file states the number of requests that are still under way, and the last file states 0: so
`integrity` reports a run that was cut short.
"""

import errno
import os
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol
from urllib.parse import parse_qsl, unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from llmtap.capture.columns import COLUMNS
from llmtap.capture.options import PUBLIC_URL_FIELDS, redact_url
from llmtap.capture.schema import META_KEY, SCHEMA, CaptureInfo, CaptureLedger, RelayCount
from llmtap.capture.store.rows import to_batch
from llmtap.clock import SystemClock
from llmtap.errors import ConfigError, LlmtapError
from llmtap.exchange.exchange import Exchange
from llmtap.user_files import open_private
from llmtap.version import __version__

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

CONNECT_TIMEOUT_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 20.0
"""Maximum time to wait for the answer to one request. An upload sends two requests or more."""
_PART_BYTES: Final = 8 << 20
_REASON_CHARS_MAX: Final = 300
_WRITE_HINT: Final = "check the permissions of the folder and the free space, or the URL and its keys"
_URL_WITHOUT_SLASHES: Final = re.compile(r"(?:s3|gs|gcs|abfss?|hdfs|file):")
_S3_FIELDS: Final = frozenset(("region", "scheme", "endpoint_override"))


class PlaceError(LlmtapError):
    """A file could not be stored in its place. The message has no secrets."""


class CapturePlace(Protocol):
    """Place to which finished files are delivered: a local folder or a remote store."""

    @property
    def name(self) -> str:
        """Path or URL, without secrets."""
        ...

    @property
    def folder(self) -> Path | None:
        """Folder of a local place, in which files are made before their delivery; None for a remote place."""
        ...

    def put(self, source: Path, name: str) -> None:
        """Store the file durably under its final name, and replace an existing file of this name. Raises
        PlaceError.

        A local place moves `source`; a remote place leaves it to the caller.
        """
        ...


def place_of(to: str) -> CapturePlace:
    """Return the place for a path or URL, without accessing the place. Raises ConfigError for an invalid
    URL."""
    if "://" not in to:
        if (slip := _URL_WITHOUT_SLASHES.match(to)) is not None:
            raise ConfigError(
                "capture.to", f"expected a URL, got {slip[0]!r}", f"write {slip[0]}//bucket/prefix"
            )
        return LocalPlace(Path(to))
    if to.startswith("file://"):
        return LocalPlace(Path(unquote(to.removeprefix("file://"))))
    return RemotePlace(to)


def capture_tag(capture: str) -> str:
    """Return the part of a file name that identifies the capture `capture` (its id)."""
    return re.sub(r"[^A-Za-z0-9_]", "_", capture) or "_"


def file_stem(capture: str, wall_ns: int, number: int) -> str:
    """Return the name of a new file without its ending. Names sort by time, and no name is used twice."""
    second = datetime.fromtimestamp(wall_ns // 1_000_000_000, UTC)
    time = f"{second:%Y%m%dT%H%M%S}{wall_ns // 1_000_000 % 1_000:03d}Z"
    return f"llmtap-{time}-{capture_tag(capture)}-{number:04d}-{secrets.token_hex(4)}"


def sync_folder(folder: Path) -> None:
    """Sync the file names in a folder to the disk, so that they survive a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> list[Path]:
    """Create the folder and its parents, only for this user; return the created folders. Raises OSError."""
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    new_folders = []
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
            new_folders.append(each)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return new_folders


class LocalPlace:
    """A local folder as the place of a capture."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.name = str(folder)
        self._folder = folder

    def put(self, source: Path, name: str) -> None:
        try:
            fd = os.open(source, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(source, self._folder / name)
            sync_folder(self._folder)
        except OSError as exc:
            reason = f"{exc.strerror}; check the permissions and the free space"
            raise PlaceError(f"{self._folder / name} cannot be written: {reason}") from None


class RemotePlace:
    """An object store, or another file system behind a URL, as the place of a capture."""

    folder: Path | None = None

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an invalid URL."""
        self.name = redact_url(url)
        self._secrets = _secrets_of(url)
        """Parts of the URL that must not be in messages."""
        self._connect, self._prefix = _s3_store(url) if url.startswith("s3://") else self._other_store(url)
        """`_connect`: function that connects to the store. `_prefix`: path in the store before the file's
        name."""
        self._filesystem: FileSystem | None = None
        """Connection to the store; None before the first use."""

    def filesystem(self) -> "FileSystem":
        """Return the file system of the store. The first call connects to it. Raises OSError."""
        if self._filesystem is None:
            self._filesystem = self._connect()
        return self._filesystem

    def put(self, source: Path, name: str) -> None:
        path = f"{self._prefix}/{name}"
        try:
            store = self.filesystem()
            size = self._upload(store, source, path)
            # A store can lose the end of a file without an error, so compare the sizes. This request for
            # the size takes little time compared with the upload.
            stored_bytes = store.get_file_info(path).size
        except (OSError, pa.ArrowException) as exc:
            reason = f"{self._clean_text(exc)}; check the URL, its keys and the network"
            raise PlaceError(f"{name} cannot be uploaded to {self.name}: {reason}") from None
        if stored_bytes != size:
            raise PlaceError(
                f"{name} was not uploaded completely to {self.name}: {stored_bytes} of {size} bytes;"
                " check the network and the quota of the bucket"
            )

    @staticmethod
    def _upload(store: "FileSystem", source: Path, path: str) -> int:
        size = 0
        try:
            out = store.open_output_stream(path)
        except FileNotFoundError:
            # The store has real folders (an object store has none), and the folder of the file is missing.
            store.create_dir(path.rpartition("/")[0], recursive=True)
            out = store.open_output_stream(path)
        # Do not use `with`: after a failed write, it would close the stream, and wait for one more request.
        with source.open("rb") as file:
            while part := file.read(_PART_BYTES):
                out.write(part)
                size += len(part)
        out.close()
        return size

    def _other_store(self, url: str) -> tuple[Callable[[], "FileSystem"], str]:
        """Return a function that opens the store (pyarrow reads the URL), and the path in the store."""
        from pyarrow.fs import FileSystem

        if url.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in url:
            url += ("&" if "?" in url else "?") + f"retry_limit_seconds={REQUEST_TIMEOUT_S:g}"
        try:
            store, prefix = FileSystem.from_uri(url)
        except (ValueError, OSError, pa.ArrowException, NotImplementedError) as exc:
            # Some file systems (hdfs) connect immediately. If that fails, the capture must not begin.
            problem = f"{self.name} cannot be used: {self._clean_text(exc)}"
            raise ConfigError("capture.to", problem, "check the URL and the access to it") from None
        if not prefix.strip("/"):
            raise ConfigError(
                "capture.to", f"{self.name} has no bucket or folder after ://", "such as gs://bucket"
            )
        return (lambda: store), prefix.rstrip("/")

    def _clean_text(self, exc: Exception) -> str:
        """Return the error's text on one line of limited length, with *** in place of the URL's secrets."""
        text = " ".join(str(exc).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text[:_REASON_CHARS_MAX] or type(exc).__name__


def _s3_store(url: str) -> tuple[Callable[[], "FileSystem"], str]:
    """Return a function that opens an S3 store, and the path in it. Time-outs are set, because without a
    network a store with pyarrow's defaults would hang."""
    from pyarrow import fs

    shown = redact_url(url)
    rest, _, query = url.removeprefix("s3://").partition("?")
    user, secret = None, None
    if ":" in rest.rpartition("@")[0]:
        keys, _, rest = rest.rpartition("@")
        user, _, secret = keys.partition(":")
    bucket = rest.partition("/")[0]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        raise ConfigError("capture.to", f"{shown} has no bucket", "write s3://bucket/prefix")
    fields = dict(parse_qsl(query))
    for name in fields:
        if name not in _S3_FIELDS:
            problem = f"the URL {shown} has an unknown field {name!r} after the ?"
            raise ConfigError("capture.to", problem, f"known fields: {', '.join(sorted(_S3_FIELDS))}")
    endpoint = fields.get("endpoint_override", "")
    scheme, separator, host = endpoint.partition("://")
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        # `request_timeout` has an effect on Linux, contrary to its documentation (pyarrow 26). The SDK's
        # default, 3 s, is short for an upload.
        "request_timeout": REQUEST_TIMEOUT_S,
        # Make one attempt only: the finisher retries with longer pauses.
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1),
        # Send a small file in one request.
        "allow_delayed_open": True,
        "scheme": fields.get("scheme") or (scheme if separator else "https"),
    }
    if endpoint:
        options["endpoint_override"] = (host if separator else endpoint).rstrip("/")
    if user is not None:
        options |= {"access_key": unquote(user), "secret_key": unquote(secret or "")}

    def connect() -> "FileSystem":
        region = fields.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region is None and not endpoint:
            region = fs.resolve_s3_region(bucket)
        if user is not None or "AWS_ACCESS_KEY_ID" in os.environ:
            # Credentials are given, so do not query the metadata service, which exists only in the cloud.
            os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
        return fs.S3FileSystem(region=region or "us-east-1", **options)

    return connect, unquote(rest).strip("/")


def _secrets_of(url: str) -> list[str]:
    """Return the parts of a URL that `redact_url` hides, as written and decoded, longest first."""
    rest, _, query = url.partition("://")[2].partition("?")
    texts = {url}
    if "@" in rest:
        keys = rest.rpartition("@")[0]
        texts |= {keys, *keys.split(":", 1)}
    texts |= {value for name, value in parse_qsl(query) if name not in PUBLIC_URL_FIELDS}
    texts |= {unquote(text) for text in texts}
    return sorted((text for text in texts if len(text) > 3), key=len, reverse=True)


ROW_GROUP_BYTES: Final = 32 << 20
"""Size of a row group in memory: some 4,000 exchanges of 200 events."""
_ZSTD_LEVEL: Final = 3


def write_parquet(where: Path | BinaryIO, info: CaptureInfo, batches: Iterable[pa.RecordBatch]) -> int:
    """Write the rows in order, and return their number. Memory: one row group. Raises OSError."""
    if isinstance(where, Path):
        with open(where, "wb", opener=open_private) as file:
            return write_parquet(file, info, batches)
    rows = 0
    writer = pq.ParquetWriter(
        where,
        SCHEMA,
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        store_schema=False,
        use_dictionary=[_leaf_path(SCHEMA.field(column.name)) for column in COLUMNS if not column.distinct],
        write_statistics=[column.name for column in COLUMNS if column.statistics],
        write_page_checksum=True,
    )
    try:
        for group in _row_groups(batches):
            rows += group.num_rows
            writer.write_table(group, row_group_size=group.num_rows)
        writer.add_key_value_metadata({META_KEY: msgspec.json.encode(info)})
    finally:
        writer.close()
    return rows


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Join small batches to tables of about ROW_GROUP_BYTES, one for each row group of the file."""
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        group.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(group, SCHEMA)
            group, size = [], 0
    if group:
        yield pa.Table.from_batches(group, SCHEMA)


def _leaf_path(field: pa.Field) -> str:
    """Return the path of a field's values in Parquet; those of a list are two levels below the field."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)


BATCH_ROWS: Final = 1_000
FILE_BYTES: Final = 64 << 20
"""Size in memory of the rows of one file: some 8,000 exchanges of 200 events."""


def check_place(to: str | Path) -> CapturePlace:
    """Return the place of a capture. Create a local folder, and try to write to it. Raises ConfigError."""
    shown = redact_url(str(to))
    try:
        place = place_of(str(to))
        if place.folder is not None:
            make_folder(place.folder)
            # Create a file, because permissions alone do not show that a file system is read-only.
            with tempfile.TemporaryFile(prefix=".llmtap-", dir=place.folder):
                pass
    except ConfigError as exc:
        raise ConfigError(shown, exc.problem, exc.hint) from None
    except OSError as exc:
        raise ConfigError(shown, f"cannot be written: {exc.strerror}", _WRITE_HINT) from None
    return place


class RunWriter:
    """Writes the exchanges of a replay, benchmark or simulation to a folder or URL, as in `capture.to`."""

    def __init__(self, to: str | Path, expected: Mapping[str, int], info: CaptureInfo, *, meter: str) -> None:
        """Raises ConfigError, which names `to`, if files cannot be written to it.

        `expected`: number of exchanges of each relay. `info`: metadata of the files; the capture's id, the
        version of llmtap and the time are added.
        """
        self._shown_place = redact_url(str(to))
        """Name of the place without secrets, for messages."""
        self._clock = SystemClock()
        now_ns = self._clock.wall_ns()
        began = datetime.fromtimestamp(now_ns // 10**9, UTC)
        self._info = msgspec.structs.replace(
            info,
            capture=f"{began:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
            tap_version=__version__,
            began_ns=now_ns,
        )
        self._meter = meter
        """Identifier of the writer in the ledger of each file."""
        self._expected_counts = dict(expected)
        """By relay: number of exchanges, so that a reader finds missing rows."""
        self._written_counts: Counter[str] = Counter()
        """By relay: number of exchanges written so far."""
        self._files = 0
        """Number of files so far."""
        self._rows: list[Exchange] = []
        self._batches: list[pa.RecordBatch] = []
        """Encoded rows of the next file."""
        self._bytes = 0
        """Size of `_batches`, which are written when a file has enough."""
        self._place = check_place(to)

    def add(self, x: Exchange) -> None:
        """Add an exchange, and write a file if it is full. Raises ConfigError if it cannot be written."""
        self._rows.append(x)
        if len(self._rows) >= BATCH_ROWS:
            self._encode()
            if self._bytes >= FILE_BYTES:
                self._write(last=False)

    def close(self) -> None:
        """Write the remaining rows to the last file. Raises ConfigError if it cannot be written."""
        self._encode()
        self._write(last=True)

    def _encode(self) -> None:
        rows, self._rows = self._rows, []
        batch, failed = to_batch(rows, capture=self._info.capture, level=self._info.level)
        if failed:
            raise failed[0]
        self._written_counts.update(x.relay for x in rows)
        self._batches.append(batch)
        self._bytes += batch.nbytes

    def _write(self, *, last: bool) -> None:
        batches, self._batches, self._bytes = self._batches, [], 0
        self._files += 1
        relays = {
            name: RelayCount(opened, unsettled=opened - self._written_counts[name])
            for name, opened in self._expected_counts.items()
        }
        now_ns = self._clock.wall_ns()
        name = file_stem(self._info.capture, now_ns, self._files) + ".parquet"
        info = msgspec.structs.replace(
            self._info, ledger=CaptureLedger(relays, meter=self._meter, closed=last), began_ns=now_ns
        )
        try:
            with tempfile.TemporaryDirectory(prefix=".llmtap-", dir=self._place.folder) as scratch:
                file = Path(scratch) / name
                write_parquet(file, info, batches)
                self._place.put(file, name)
        except PlaceError as exc:
            raise ConfigError(self._shown_place, f"cannot be written: {exc}", _WRITE_HINT) from None
        except OSError as exc:
            raise ConfigError(
                self._shown_place, f"cannot be written: {exc.strerror or exc}", _WRITE_HINT
            ) from None
