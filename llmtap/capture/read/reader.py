"""Read captures: files, folders and URLs as a table or a stream of rows or Exchanges.

`read` returns a `Capture`, which `llmtap report`, the trace format of captures and users of the package
iterate over.

- Rows come in the order of the files' names, which sort by time.
- Of a folder, files named `llmtap-*.parquet` are read, and if there are no such files, all files named
`*.parquet`. Hidden files and folders, whose names begin with `.` or `_`, are not read.
- Of a local folder, the spools in its subfolder `.spool` are read, too. A spool can become a Parquet file of
  the same name at any moment; only one of the two is read.
- Memory holds one batch, except if a whole table is read.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from llmtap.capture import schema
from llmtap.capture.options import LEVELS, redact_url
from llmtap.capture.read import integrity
from llmtap.capture.store.rows import exchanges_of
from llmtap.capture.store.spool import SpoolContents, SpoolError, read_spool
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import Exchange
from llmtap.units import format_bytes

_BATCH_BYTES: Final = 16 << 20
"""Approximate memory of a batch. Rows with bodies are large, so their batches have fewer rows."""
_VALUE_BYTES: Final = 8
"""Assumed memory of a value, unless its row group reports a larger size."""
_ROWS_MAX: Final = 10_000
_ROWS_MIN: Final = 64
_URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_OWN_FILES: Final = "llmtap-*.parquet"
_SPOOLS: Final = "llmtap-*.spool"
_SPOOL_FOLDER: Final = ".spool"

_READ_ERRORS: Final = (pa.ArrowException, OSError, UnicodeError)
"""Exceptions with which Arrow rejects a file; UnicodeError if the name of a column is not UTF-8."""

Where = str | os.PathLike[str]


class CaptureError(ConfigError):
    """A file, folder or URL is missing, damaged or not a capture. `place` is its name."""


@dataclass(frozen=True, slots=True)
class CaptureFile:
    """One file of a capture."""

    name: str
    """Local path, or URL without credentials."""
    rows: int
    size_bytes: int
    info: schema.CaptureInfo
    path: str
    """Path in `filesystem`."""
    filesystem: Any
    """`pyarrow.fs.FileSystem` that has the file."""
    contents: SpoolContents | None = field(default=None, repr=False)
    """Rows of a spool at the time of `read`; None for a Parquet file."""

    @property
    def spool(self) -> bool:
        """Whether the file is a spool, not yet Parquet. Rows that it gets after `read` are not returned."""
        return self.contents is not None


class _FileEntry(NamedTuple):
    """A file that was listed, but not opened yet."""

    name: str
    path: str
    filesystem: Any
    size_bytes: int

    @property
    def is_spool(self) -> bool:
        return self.path.endswith(".spool")

    @property
    def stem(self) -> str:
        """Name without ending: the same for a spool and its Parquet file."""
        return PurePosixPath(self.path).stem

    @property
    def sort_key(self) -> tuple[str, ...]:
        """Key that sorts files by folder and name, and a spool to the place of its later Parquet file."""
        folder = PurePosixPath(self.path).parent
        return str(folder.parent if folder.name == _SPOOL_FOLDER else folder), self.stem, self.path


class Capture:
    """A capture that `read` has opened. Each iteration over its rows opens the files again."""

    def __init__(
        self,
        files: Sequence[CaptureFile],
        broken: Sequence[tuple[str, str]],
        places: Sequence[str],
        *,
        skip_broken: bool,
    ) -> None:
        self.files = tuple(files)
        self.broken = list(broken)
        """Files that could not be read to their end: name and reason."""
        self._places = places
        """Names of files, folders or URLs, as the user gave them."""
        self._skip_broken = skip_broken
        """Whether to leave out broken files instead of raising."""

    def __len__(self) -> int:
        return sum(file.rows for file in self.files)

    def __repr__(self) -> str:
        info = self.info
        size = format_bytes(sum(file.size_bytes for file in self.files))
        spools = sum(file.spool for file in self.files)
        files = f"{len(self.files):,} files" + (f" ({spools:,} in the spool)" if spools else "")
        parts = [f"{len(self):,} exchanges", files, size]
        parts += [f"level {info.level}"] if info.level else []
        parts += [f"from {info.source}"] if info.source else []
        parts += [f"{len(self.broken):,} broken"] if self.broken else []
        return f"<Capture {', '.join(parts)}>"

    @property
    def info(self) -> schema.CaptureInfo:
        """Metadata of all files together: the highest privacy level, the earliest start, the total damage,
        the merged ledger, and other values only if all files have the same."""
        return _merged_info([file.info for file in self.files])

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows, with the given columns (None: with all columns). Raises CaptureError."""
        wanted = schema.SCHEMA if columns is None else _schema_of(columns)
        for file in self.files:
            try:
                yield from self._spool_batches(file, wanted) if file.spool else _file_batches(file, wanted)
            except FileNotFoundError:
                self._skip_broken_file(file.name, "was moved or deleted while it was read")
            except (*_READ_ERRORS, SpoolError, msgspec.MsgspecError) as exc:
                self._skip_broken_file(file.name, f"is damaged: {_first_line(exc)}")

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all rows as an Arrow table, with `info` as metadata. Raises CaptureError."""
        wanted = schema.SCHEMA if columns is None else _schema_of(columns)
        table = pa.Table.from_batches(self.batches(columns), wanted)
        return table.cast(schema.schema_with_info(wanted, self.info))

    def exchanges(self) -> Iterator[Exchange]:
        """Yield all rows as Exchanges (`rows.exchanges_of`)."""
        return chain.from_iterable(map(exchanges_of, self.batches()))

    def integrity(self) -> integrity.Integrity:
        """Find missing exchanges by the numbers of the rows and the counts of the relays."""
        batches = self.batches(integrity.COLUMNS)
        # Pass `broken` itself, not a copy: reading the batches can add files to it.
        return integrity.check_integrity([file.info for file in self.files], batches, self.broken)

    def _spool_batches(self, file: CaptureFile, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a spool. If it has become a Parquet file, yield as many rows of that file as the
        spool had. Raises FileNotFoundError if both are missing."""
        assert file.contents is not None
        batches = file.contents.batches()
        try:
            first = next(batches, None)  # This opens the file, so it can be read even if it is deleted now.
        except SpoolError:
            if os.path.exists(file.path):
                raise
            later = _parquet_of_spool(Path(file.path).stem, self._places)
            if later is None:
                raise FileNotFoundError(file.path) from None
            # The Parquet file has all rows of the spool, in the same order.
            first, batches = None, _file_batches(_open_entry(later), schema.SCHEMA)
        remaining = file.rows
        for batch in chain([] if first is None else [first], batches):
            yield batch.select(wanted.names).cast(wanted).slice(0, remaining)
            remaining -= min(remaining, batch.num_rows)
            if not remaining:
                return

    def _skip_broken_file(self, name: str, problem: str) -> None:
        if not self._skip_broken:
            raise CaptureError(name, problem, _SKIP_HINT) from None
        if (name, problem) not in self.broken:
            self.broken.append((name, problem))


_SKIP_HINT: Final = "to read the other files, use skip_broken=True or `llmtap report --skip-broken`"
_CONVERT_HINT: Final = "to read a trace of another tool, convert it with `llmtap convert`"


def read(where: Where | Sequence[Where], *, skip_broken: bool = False) -> Capture:
    """Open a capture: a file, a folder, or several.

    Args:
        where: local paths, or URLs of any file system that `pyarrow.fs` knows (`s3://bucket/prefix`).
        skip_broken: add files that cannot be read to `Capture.broken`, instead of raising an exception.

    Raises:
        CaptureError: there is no file, or a file is not a capture, or is damaged.
        CaptureVersionError: a file has a later version of the schema than this llmtap reads.
    """
    places = [os.fspath(where)] if isinstance(where, str | os.PathLike) else [os.fspath(w) for w in where]
    if not places:
        raise CaptureError("capture", "no file, folder or URL to read is given", "such as captures/run1")
    if not all(place.strip() for place in places):
        raise CaptureError(
            "capture", "the name of the capture to read is empty", "check whether a shell variable is not set"
        )
    opened_files: dict[str, CaptureFile] = {}
    broken: list[tuple[str, str]] = []
    for file in _all_entries(places):
        try:
            opened = _open_file_or_successor(file, places)
        except CaptureError as exc:
            if not skip_broken:
                raise
            broken.append((file.name, exc.problem))
        else:
            if opened is not None:
                opened_files[opened.name] = opened
    if not opened_files and not broken:
        raise CaptureError(
            redact_url(places[0]),
            "the Parquet files were removed while llmtap read the folder",
            "stop the program that removes them, or read a copy of the folder",
        )
    return Capture(list(opened_files.values()), broken, places, skip_broken=skip_broken)


def _open_file_or_successor(file: _FileEntry, places: Sequence[str]) -> CaptureFile | None:
    """Open a file, or the Parquet file that a spool has become. Return None if the file was deleted."""
    with suppress(FileNotFoundError):
        return _open_entry(file)
    later = _parquet_of_spool(file.stem, places) if file.is_spool else None
    if later is not None:
        with suppress(FileNotFoundError):
            return _open_entry(later)
    return None


# ---------------------------------------------------------------- find the files


def _all_entries(places: Sequence[str]) -> list[_FileEntry]:
    """Return the files of all places, each once: of a spool and its Parquet file, only the Parquet file."""
    # List all spools before the other files: a spool that becomes a Parquet file between both lists is then
    # found twice, instead of not at all.
    spools = [_entries_at(place, spools=True) for place in places]
    files: dict[str, _FileEntry] = {}
    for place, waiting in zip(places, spools, strict=True):
        here = waiting + _entries_at(place, spools=False)
        if not here:
            raise CaptureError(redact_url(place), *_no_file_problem(place))
        here.sort(key=lambda file: file.sort_key)
        files |= {file.name: file for file in here if file.name not in files}
    finished = {file.stem for file in files.values() if not file.is_spool}
    return [file for file in files.values() if not (file.is_spool and file.stem in finished)]


def _parquet_of_spool(stem: str, places: Sequence[str]) -> _FileEntry | None:
    """Return the Parquet file that a spool has become; None if there is none."""
    for place in places:
        with suppress(CaptureError):  # A place can be the path of the spool itself, which no longer exists.
            for file in _entries_at(place, spools=False):
                if file.stem == stem:
                    return file
    return None


def _no_file_problem(place: str) -> tuple[str, str]:
    """Return the texts of the error for a place without files: the problem, and the hint."""
    if not _URL.match(place) and (Path(place).expanduser() / _SPOOL_FOLDER).is_dir():
        return "has no Parquet file, and its spool is empty", "nothing has been captured there yet"
    if _URL.match(place):
        hint = f"{_CONVERT_HINT}; a running capture keeps its latest minutes in a local spool"
        return "has no Parquet file", hint
    return "has no Parquet file", _CONVERT_HINT


def _entries_at(place: str, *, spools: bool) -> list[_FileEntry]:
    """Return the spools at a place or, if `spools` is false, the other files."""
    shown = redact_url(place)  # A URL can contain credentials.
    if spools and _URL.match(place) and not place.startswith("file:"):
        return []  # Spools are always local.
    try:
        filesystem, path, prefix = _filesystem_of(place)
        found_info = filesystem.get_file_info(path)
        if found_info.type == fs.FileType.NotFound:
            raise CaptureError(shown, "does not exist", "check the path or the URL")
        infos = [found_info] if found_info.type == fs.FileType.File else _folder_files(filesystem, path)
    except _READ_ERRORS as exc:
        hint = "check the path and its permissions, or the URL and its keys"
        raise CaptureError(shown, f"cannot be read: {_first_line(exc)}", hint) from None
    entries = [_FileEntry(prefix + f.path, f.path, filesystem, f.size or 0) for f in infos]
    return [file for file in entries if file.is_spool == spools]


def _filesystem_of(place: str) -> tuple[Any, str, str]:
    """Return the file system of a place, the path in it, and the text before this path in the place's URL."""
    if not _URL.match(place):
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(place)), ""
    try:
        filesystem, path = fs.FileSystem.from_uri(place)
    except (pa.ArrowException, ValueError) as exc:
        # Arrow's errors repeat the URL, so quote them only if the URL has no credentials.
        why = f": {_first_line(exc)}" if redact_url(place) == place else ""
        hint = "such as s3://bucket/prefix, or give the path of a local folder"
        raise CaptureError(redact_url(place), f"is not a URL that llmtap can read{why}", hint) from None
    return filesystem, path, place[: place.index("://") + 3]


def _folder_files(filesystem: Any, folder: str) -> list[Any]:
    """Return the spools and Parquet files below a folder that are not hidden. If llmtap has written any of
    them, the Parquet files of other programs are left out."""
    own_files: list[Any] = []
    other_files: list[Any] = []
    for f in filesystem.get_file_info(fs.FileSelector(folder, recursive=True)):
        *folders, name = [part for part in f.path[len(folder) :].split("/") if part]
        spool = fnmatchcase(name, _SPOOLS) and filesystem.type_name == "local"
        if f.type != fs.FileType.File or not (spool or name.endswith(".parquet")):
            continue
        folders = folders[:-1] if spool and folders[-1:] == [_SPOOL_FOLDER] else folders
        if not any(part[0] in "._" for part in (*folders, name)):
            (own_files if spool or fnmatchcase(name, _OWN_FILES) else other_files).append(f)
    return own_files or other_files


# ---------------------------------------------------------------- read the files


def _open_entry(entry: _FileEntry) -> CaptureFile:
    """Open a file. Raises FileNotFoundError (deleted), CaptureVersionError (too new) or CaptureError."""
    name, path, filesystem, size = entry
    if entry.is_spool:
        return _open_spool(entry)
    try:
        with filesystem.open_input_file(path) as source, pq.ParquetFile(source) as file:
            info = schema.info_of(file.schema_arrow)
            rows = file.metadata.num_rows
    except FileNotFoundError:
        raise
    except _READ_ERRORS as exc:
        raise CaptureError(name, f"cannot be read as Parquet: {_first_line(exc)}", _CONVERT_HINT) from None
    except msgspec.MsgspecError as exc:
        raise CaptureError(
            name, f"has invalid llmtap metadata: {exc}", "the file is damaged, or another program wrote it"
        ) from None
    if info is None:
        raise CaptureError(
            name,
            "is a Parquet file, but not a capture of llmtap",
            "a program that changes a capture must keep the metadata of its schema; pandas does not",
        )
    if info.schema_version > schema.VERSION:
        raise schema.CaptureVersionError(name, info.schema_version)
    return CaptureFile(name, rows, size, info, path, filesystem)


def _open_spool(entry: _FileEntry) -> CaptureFile:
    """Open a spool. Raises FileNotFoundError if the spool was deleted, else CaptureError."""
    path = Path(entry.path)
    try:
        contents = read_spool(path)
        # While a spool is being written, its end can look damaged for a moment: read it again.
        while contents.damaged and (newer := read_spool(path)).damaged != contents.damaged:
            contents = newer
    except SpoolError as exc:
        if not path.exists():
            raise FileNotFoundError(entry.path) from None
        raise CaptureError(entry.name, f"cannot be read as a spool: {exc}", _SKIP_HINT) from None
    except (pa.ArrowException, msgspec.MsgspecError) as exc:
        raise CaptureError(entry.name, f"cannot be read as a spool: {_first_line(exc)}", _SKIP_HINT) from None
    # Use the same metadata as in the Parquet file that will be made from this spool.
    info = msgspec.structs.replace(
        contents.info, schema_version=schema.VERSION, ledger=contents.ledger, damaged=contents.damaged
    )
    return CaptureFile(
        entry.name, contents.rows, entry.size_bytes, info, entry.path, entry.filesystem, contents
    )


def _file_batches(file: CaptureFile, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    # Read without `pre_buffer`: it would load a whole row group, which can be larger than a batch should be.
    with (
        file.filesystem.open_input_file(file.path) as source,
        pq.ParquetFile(
            source, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as parquet,
    ):
        names = [name for name in wanted.names if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(batch_size=_rows_at_once(parquet.metadata), columns=names):
            yield schema.migrate(batch, file.info.schema_version, schema=wanted, where=file.name).cast(wanted)


def _rows_at_once(metadata: Any) -> int:
    """Return the number of rows that take about _BATCH_BYTES of memory without dictionary encoding."""
    size = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        values = sum(group.column(i).num_values for i in range(group.num_columns))
        size += max(group.total_byte_size, values * _VALUE_BYTES)
    rows = _BATCH_BYTES * max(1, metadata.num_rows) // max(1, size)
    return int(max(_ROWS_MIN, min(_ROWS_MAX, rows)))


def _schema_of(columns: Sequence[str]) -> pa.Schema:
    for name in columns:
        if name not in schema.SCHEMA.names:
            raise CaptureError(
                f"column {name}", "is not a column of captures", "capture/FORMAT.md lists the columns"
            )
    return pa.schema([schema.SCHEMA.field(name) for name in columns])


def _merged_info(infos: Sequence[schema.CaptureInfo]) -> schema.CaptureInfo:
    """Return the metadata of a capture of several files: the values that all files share."""
    if len(infos) < 2:
        return infos[0] if infos else schema.CaptureInfo()
    first = infos[0]
    same = {
        name: getattr(first, name)
        for name in schema.CaptureInfo.__struct_fields__
        if all(getattr(info, name) == getattr(first, name) for info in infos)
    }
    for name in ("arrivals", "blocks"):
        same.setdefault(name, "")  # If the files differ, use "" (mixed), not the default.
    damaged: dict[str, int] = {}
    for info in infos:
        for unit, n in info.damaged.items():
            damaged[unit] = damaged.get(unit, 0) + n
    same |= {
        "level": max((info.level for info in infos), key=lambda level: (*LEVELS, level).index(level)),
        "began_ns": min(info.began_ns for info in infos),
        "ledger": integrity.latest_ledger(infos),
        "damaged": damaged,
    }
    return schema.CaptureInfo(**same)


def _first_line(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return (str(exc).splitlines() or [type(exc).__name__])[0]
