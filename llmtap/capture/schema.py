"""Format of a capture: columns (one row per Exchange, a request and its response), metadata, and versions.

`SCHEMA` is the Arrow schema of `columns.py`, `CaptureInfo` the metadata of a file with the counts of relays
(`CaptureLedger`), and `migrate` brings the rows of an older version to the present columns. `store/rows.py`
fills the columns. FORMAT.md describes each one.
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
"""Version of the columns and the metadata. A reader accepts it and all older ones (`migrate`)."""
META_KEY: Final = b"llmtap"
"""Key in the schema's metadata under which the CaptureInfo is stored as JSON."""
EVENT_CLASS_NAMES: Final = tuple(c.name.lower() for c in EventClass)
"""Names of the event classes by code; the column holds the names."""

_TYPES: Final = {
    "string": pa.string(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "uint8": pa.uint8(),
    "bool": pa.bool_(),
    "double": pa.float64(),
    "timestamp us UTC": pa.timestamp("us", "UTC"),
}


def _arrow_type(text: str) -> pa.DataType:
    inner = _TYPES[text.removeprefix("list of ")]
    return pa.list_(inner) if text.startswith("list of ") else inner


SCHEMA: Final = pa.schema([pa.field(column.name, _arrow_type(column.type)) for column in COLUMNS])
"""All columns are nullable: a foreign trace has few of them."""


class RelayCount(msgspec.Struct, frozen=True, omit_defaults=True):
    """A relay's report on its exchanges."""

    opened: int
    """Exchanges begun: they have the numbers 1 to `opened`."""
    dropped: dict[str, int] = {}
    unsettled: int = 0
    """Exchanges that are under way, or not acknowledged yet."""
    since: int = 0
    """Numbers up to this one, and their drops (`before`), are older than this capture."""
    before: dict[str, int] = {}
    packets: dict[str, int] = {}
    """Only of a passive vantage: packets `captured` and `lost`; exchanges in lost packets have no number."""
    watched: dict[str, int] = {}


class CaptureLedger(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts, at the end of a file, of exchanges that the file does not hold."""

    relays: dict[str, RelayCount] = {}
    dropped: dict[str, int] = {}
    """Exchanges that were measured and not kept, by reason, since the meter started."""
    meter: str = ""
    """Run of the meter that counted `dropped`. Of several counts of a run, the last one is valid."""
    closed: bool = False
    """Whether the capture was closed properly, so that no more exchanges follow."""


class CaptureInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Metadata of a file, as JSON in the schema's metadata."""

    schema_version: int = VERSION
    capture: str = ""
    """Id of one start of the proxy. Block hashes are comparable within one capture only, except with
    `pair_key`."""
    tap_version: str = ""
    config: str = ""
    level: str = ""
    """Highest privacy level that a row may have (`options.LEVELS`)."""
    coarse: dict[str, int] = {}
    """Steps of its times, sizes and counts at the level `coarse` (`privacy/coarse.py`)."""
    tokenizer: str | None = None
    block_unit: str = ""
    block_size: int = 0
    pair_key: str = ""
    """Id of the configured key of the hashes: captures with the same id have comparable hashes."""
    arrivals: str = "wall"
    """`wall`: `arrival_ns` counts from 1970 UTC. `trace`: it counts from the time 0 of the trace."""
    blocks: str = "salted"
    """Kind of the block ids of prompts. `salted`: keyed hashes. `trace`: the ids of the source."""
    source: str = ""
    """Format that the rows were converted from; empty for live traffic."""
    began_ns: int = 0
    ledger: CaptureLedger = CaptureLedger()
    damaged: dict[str, int] = {}


def with_info(schema: pa.Schema, info: CaptureInfo) -> pa.Schema:
    return schema.with_metadata({META_KEY: msgspec.json.encode(info)})


def info_of(schema: pa.Schema) -> CaptureInfo | None:
    """Return the metadata of a file; None if the file is not a capture of llmtap. Raises
    msgspec.MsgspecError."""
    raw = (schema.metadata or {}).get(META_KEY)
    return None if raw is None else decode_json(raw, CaptureInfo)


class CaptureVersionError(ConfigError):
    """A capture has a later version of the schema than this llmtap."""

    def __init__(self, where: str, version: int) -> None:
        super().__init__(
            where,
            f"has schema version {version}, but this llmtap reads versions up to {VERSION}",
            "read it with the llmtap that wrote it, or a newer one",
        )
        self.where = where
        self.version = version


def migrate(
    batch: pa.RecordBatch, version: int, *, schema: pa.Schema = SCHEMA, where: str = "capture"
) -> pa.RecordBatch:
    """Bring a batch of `version` to `schema`.

    Columns that it lacks are null, unknown ones are dropped. Raises CaptureVersionError for a newer version,
    pa.ArrowInvalid for values that do not fit.
    """
    if version > VERSION:
        raise CaptureVersionError(where, version)
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(at)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def is_back(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return a mask of the rows that were captured between a gateway and its engines. They repeat requests
    that other rows have."""
    return pc.fill_null(pc.equal(batch.column("side"), BACK), False)
