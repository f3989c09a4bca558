"""Destinations of finished files: a local folder, or an object store that `pyarrow.fs` supports.

`open_place` turns a path or a URL into a `Place`, whose `put` stores a file; also the names of files
(`file_stem`). URLs may carry keys (`s3://access:secret@bucket/...`): no message and no log line has them
(`redacted`).
"""

import errno
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qsl, unquote, urlencode

import pyarrow as pa

from llmtap.errors import ConfigError, LlmtapError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

CONNECT_TIMEOUT_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 20.0
"""Longest silence of a store. The SDK tries once more when it closes."""
_PART_BYTES: Final = 8 << 20
_REASON_LENGTH: Final = 300
_HARMLESS: Final = frozenset(("region", "scheme", "endpoint_override", "project_id", "retry_limit_seconds"))
"""Query fields of a URL that are no secret."""
_SLIP: Final = re.compile(r"(?:s3|gs|gcs|abfss?|hdfs|file):")
_S3_KNOWN: Final = frozenset(("region", "scheme", "endpoint_override"))


class PlaceError(LlmtapError):
    """A place did not take a file. The message has no secrets."""


class Place(Protocol):
    """Where finished files go."""

    @property
    def name(self) -> str:
        """Name without secrets."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder of a local place, in which files are made; else None."""
        ...

    def put(self, made: Path, name: str) -> None:
        """Store the file durably under its final name, replacing one of that name. Raises PlaceError.

        A local place takes `made` away; of a remote one it stays the caller's.
        """
        ...


def open_place(to: str) -> Place:
    """Return the place of that name, untouched. Raises ConfigError for an invalid URL."""
    if "://" not in to:
        if (slip := _SLIP.match(to)) is not None:
            raise ConfigError("capture.to", f"expected a URL, got {slip[0]!r}", f"{slip[0]}//bucket/prefix")
        return LocalPlace(Path(to))
    if to.startswith("file://"):
        return LocalPlace(Path(unquote(to.removeprefix("file://"))))
    return RemotePlace(to)


def redacted(url: str) -> str:
    """Return the URL without user, password (up to the last @) and query fields that may be secret."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    rest, _, query = rest.partition("?")
    if "@" in rest:
        rest = "***@" + rest.rpartition("@")[2]
    if not query:
        return f"{scheme}://{rest}"
    fields = [
        (name, _without_user(value) if name in _HARMLESS else "***")
        for name, value in parse_qsl(query, keep_blank_values=True)
    ]
    return f"{scheme}://{rest}?{urlencode(fields, safe='*/:@')}"


def capture_tag(capture: str) -> str:
    """Return the part of file names that stands for a capture."""
    return re.sub(r"[^A-Za-z0-9_]", "_", capture) or "_"


def file_stem(capture: str, wall_ns: int, number: int) -> str:
    """Return the name of a new file without its ending; names sort by time and are never used twice."""
    at = datetime.fromtimestamp(wall_ns // 1_000_000_000, UTC)
    when = f"{at:%Y%m%dT%H%M%S}{wall_ns // 1_000_000 % 1_000:03d}Z"
    return f"llmtap-{when}-{capture_tag(capture)}-{number:04d}-{secrets.token_hex(4)}"


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> list[Path]:
    """Create the folder and its missing parents for this user; return the new ones. Raises OSError."""
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    made = []
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
            made.append(each)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return made


class LocalPlace:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.name = str(folder)
        self._folder = folder

    def put(self, made: Path, name: str) -> None:
        try:
            fd = os.open(made, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(made, self._folder / name)
            sync_folder(self._folder)
        except OSError as exc:
            raise PlaceError(f"{self._folder / name}: {exc.strerror}") from None


class RemotePlace:
    """A store behind a URL."""

    folder: Path | None = None

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that cannot be."""
        self.name = redacted(url)
        self._secrets = _secrets_of(url)
        self._connect, self._prefix = _s3(url) if url.startswith("s3://") else self._other(url)
        self._store: FileSystem | None = None

    def store(self) -> "FileSystem":
        """Return the store, connected at the first call. Raises OSError."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    def put(self, made: Path, name: str) -> None:
        path = f"{self._prefix}/{name}"
        try:
            store = self.store()
            size = self._upload(store, made, path)
            # A store that lost the end of a file without saying so is asked once: cheap beside an upload.
            there = store.get_file_info(path).size
        except (OSError, pa.ArrowException) as exc:
            raise PlaceError(f"{name} to {self.name}: {self._clean(exc)}") from None
        if there != size:
            raise PlaceError(f"{name} to {self.name}: {there} bytes of {size} are there after the upload")

    @staticmethod
    def _upload(store: "FileSystem", made: Path, path: str) -> int:
        size = 0
        try:
            out = store.open_output_stream(path)
        except FileNotFoundError:
            # Where folders are real; an object store has none.
            store.create_dir(path.rpartition("/")[0], recursive=True)
            out = store.open_output_stream(path)
        # Not in a `with`: after a failed write it would close, which is one more request to wait for.
        with made.open("rb") as file:
            while part := file.read(_PART_BYTES):
                out.write(part)
                size += len(part)
        out.close()
        return size

    def _other(self, url: str) -> tuple[Callable[[], "FileSystem"], str]:
        """Return a function that opens the store, and the path in it, as pyarrow reads the URL."""
        from pyarrow.fs import FileSystem

        if url.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in url:
            url += ("&" if "?" in url else "?") + f"retry_limit_seconds={REQUEST_TIMEOUT_S:g}"
        try:
            store, prefix = FileSystem.from_uri(url)
        except (ValueError, OSError, pa.ArrowException, NotImplementedError) as exc:
            # Some connect at once (hdfs): without them a capture had better not begin.
            raise ConfigError("capture.to", f"{self.name}: {self._clean(exc)}") from None
        if not prefix.strip("/"):
            raise ConfigError("capture.to", f"{self.name}: names no bucket or folder")
        return (lambda: store), prefix.rstrip("/")

    def _clean(self, exc: Exception) -> str:
        """Return the error's text on one line, bounded, without our secrets in any spelling."""
        text = " ".join(str(exc).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text[:_REASON_LENGTH] or type(exc).__name__


def _s3(url: str) -> tuple[Callable[[], "FileSystem"], str]:
    """Return the same for S3 with time-outs; pyarrow's own would hang without a network."""
    from pyarrow import fs

    shown = redacted(url)
    rest, _, query = url.removeprefix("s3://").partition("?")
    user, secret = None, None
    if ":" in rest.rpartition("@")[0]:
        keys, _, rest = rest.rpartition("@")
        user, _, secret = keys.partition(":")
    bucket = rest.partition("/")[0]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        raise ConfigError("capture.to", f"{shown}: names no bucket", "s3://bucket/prefix")
    fields = dict(parse_qsl(query))
    for name in fields:
        if name not in _S3_KNOWN:
            raise ConfigError("capture.to", f"{shown}: unknown {name!r}", ", ".join(sorted(_S3_KNOWN)))
    endpoint = fields.get("endpoint_override", "")
    scheme, found, host = endpoint.partition("://")
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        # Contrary to its documentation, it has an effect on Linux (pyarrow 26); the SDK's default is 3 s.
        "request_timeout": REQUEST_TIMEOUT_S,
        # One: we try again ourselves, with a longer breath.
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1),
        # A small file is then one request.
        "allow_delayed_open": True,
        "scheme": fields.get("scheme") or (scheme if found else "https"),
    }
    if endpoint:
        options["endpoint_override"] = (host if found else endpoint).rstrip("/")
    if user is not None:
        options |= {"access_key": unquote(user), "secret_key": unquote(secret or "")}

    def connect() -> "FileSystem":
        region = fields.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region is None and not endpoint:
            region = fs.resolve_s3_region(bucket)
        if user is not None or "AWS_ACCESS_KEY_ID" in os.environ:
            # Keys are at hand: no question to a metadata service that is not there outside of the cloud.
            os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
        return fs.S3FileSystem(region=region or "us-east-1", **options)

    return connect, unquote(rest).strip("/")


def _secrets_of(url: str) -> list[str]:
    """Return all that `redacted` hides, as written and decoded, longest first."""
    rest, _, query = url.partition("://")[2].partition("?")
    found = {url}
    if "@" in rest:
        keys = rest.rpartition("@")[0]
        found |= {keys, *keys.split(":", 1)}
    found |= {value for name, value in parse_qsl(query) if name not in _HARMLESS}
    found |= {unquote(text) for text in found}
    return sorted((text for text in found if len(text) > 3), key=len, reverse=True)


def _without_user(value: str) -> str:
    return re.sub(r"[^/]*@", "***@", value)
