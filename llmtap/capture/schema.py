"""Format of a capture: columns (one row per Exchange, a request and its response), metadata, and versions.

`SCHEMA` is the Arrow schema of the columns in `columns.py`. `CaptureInfo` is the metadata of a file, with the
counts that relays reported (`CaptureLedger`). `migrate` converts rows of an older version to the present
columns. `store/rows.py` fills the columns, and FORMAT.md describes each column.
"""

from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llmtap.capture.columns import COLUMNS
from llmtap.errors import ConfigError
from llmtap.exchange.exchange import BACK
from llmtap.exchange.outcome import EventClass
from llmtap.user_files import decode_json

VERSION: Final = 1
"""Version of the columns and the metadata. A reader accepts this version and all older ones (`migrate`)."""
META_KEY: Final = b"llmtap"
"""Key in the schema's metadata under which the CaptureInfo is stored as JSON."""
EVENT_CLASS_NAMES: Final = tuple(c.name.lower() for c in EventClass)
"""Names of the event classes, indexed by their codes; the column has names instead of codes."""

_TYPES: Final = {
    "string": pa.string(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "uint8": pa.uint8(),
    "bool": pa.bool_(),
    "double": pa.float64(),
    "timestamp us UTC": pa.timestamp("us", "UTC"),
}


def _arrow_type(name: str) -> pa.DataType:
    inner = _TYPES[name.removeprefix("list of ")]
    return pa.list_(inner) if name.startswith("list of ") else inner


SCHEMA: Final = pa.schema([pa.field(column.name, _arrow_type(column.type)) for column in COLUMNS])
"""All columns are nullable, because a trace of another tool has values for few of them."""


class RelayCount(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of a relay's exchanges, as the relay reported them."""

    opened: int
    """Number of exchanges begun. These have the sequence numbers from 1 to `opened`."""
    dropped: dict[str, int] = {}
    """Exchanges that the relay forwarded without measurement, by reason."""
    unsettled: int = 0
    """Exchanges that are under way, or that the meter has not acknowledged yet."""
    since: int = 0
    """Last sequence number that is older than this capture; 0 if there is none."""
    before: dict[str, int] = {}
    """Part of `dropped` that is older than this capture, by reason."""
    packets: dict[str, int] = {}
    """Packets `captured` and `lost`, only of a passive relay. Exchanges in lost packets have no number."""
    watched: dict[str, int] = {}
    """By kind: number of connections seen, only of a passive relay."""


class CaptureLedger(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts at the end of a file, by which a reader finds exchanges that have no row."""

    relays: dict[str, RelayCount] = {}
    """Latest counts of each relay, by the relay's name."""
    dropped: dict[str, int] = {}
    """Exchanges that were measured but not stored, by reason, since the meter started."""
    meter: str = ""
    """Id of the meter's run that counted `dropped`. Of several ledgers of one run, only the latest counts."""
    closed: bool = False
    """Whether the capture was closed properly, so that no more exchanges follow."""


class CaptureInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Metadata of a capture file, stored as JSON in the metadata of its schema."""

    schema_version: int = VERSION
    capture: str = ""
    """Id of one start of the proxy. Block hashes of captures with different ids can be compared only if both
    have the same `pair_key`."""
    tap_version: str = ""
    """Version of the llmtap that wrote the file."""
    config: str = ""
    """Fingerprint of the configuration, by which files with equal configurations are recognised."""
    level: str = ""
    """Highest privacy level that a row of the file can have (`options.LEVELS`)."""
    coarse: dict[str, int] = {}
    """Steps to which times, sizes and counts are rounded at the level `coarse` (`privacy/coarse.py`)."""
    tokenizer: str | None = None
    """Name of the tokenizer that counted the prompt tokens; None: none did."""
    block_unit: str = ""
    """Unit of `block_size`: `bytes` or `tokens`."""
    block_size: int = 0
    """Size of the blocks into which prompts are cut for hashing."""
    pair_key: str = ""
    """Id of the configured `capture.pair_key`: captures with the same id have comparable hashes."""
    arrivals: str = "wall"
    """`wall`: `arrival_ns` counts from 1970 UTC. `trace`: it counts from the time 0 of the trace."""
    blocks: str = "salted"
    """Kind of the block ids of prompts. `salted`: keyed hashes. `trace`: the ids of the source."""
    source: str = ""
    """Format that the rows were converted from; empty for live traffic."""
    began_ns: int = 0
    """Time of the wall clock when the file was begun."""
    ledger: CaptureLedger = CaptureLedger()
    """Counts at the end of the file."""
    damaged: dict[str, int] = {}
    """Lost `batches` and `bytes` of the spool from which the file was made."""


def schema_with_info(schema: pa.Schema, info: CaptureInfo) -> pa.Schema:
    return schema.with_metadata({META_KEY: msgspec.json.encode(info)})


def info_of(schema: pa.Schema) -> CaptureInfo | None:
    """Return the metadata of a file; None if the file is not a capture of llmtap. Raises
    msgspec.MsgspecError for invalid metadata."""
    raw = (schema.metadata or {}).get(META_KEY)
    return None if raw is None else decode_json(raw, CaptureInfo)


class CaptureVersionError(ConfigError):
    """A capture has a later version of the schema than this llmtap can read."""

    def __init__(self, where: str, version: int) -> None:
        super().__init__(
            where,
            f"has schema version {version}, but this llmtap reads versions up to {VERSION}",
            "read it with the llmtap that wrote it, or a newer one",
        )
        self.where = where
        """Name of the file."""
        self.version = version


def migrate(
    batch: pa.RecordBatch, version: int, *, schema: pa.Schema = SCHEMA, where: str = "capture"
) -> pa.RecordBatch:
    """Convert a batch of the schema version `version` to `schema`.

    Columns that the batch lacks become null, unknown columns are dropped. Raises CaptureVersionError for a
    newer version, pa.ArrowInvalid for values that do not fit the type of their column.
    """
    if version > VERSION:
        raise CaptureVersionError(where, version)
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(index)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def back_rows_mask(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return a mask of the rows that were captured between a gateway and its engines. These rows repeat
    requests that were also captured in front of the gateway."""
    return pc.fill_null(pc.equal(batch.column("side"), BACK), False)
