"""Format of a capture: columns (one row per Exchange, a request and its response), metadata, and versions.

`SCHEMA` is the Arrow schema, `CaptureInfo` the metadata of a file with the counts of relays
(`CaptureLedger`), and `migrate` brings the rows of an older version to the present columns. `store/rows.py`
fills the columns. FORMAT.md describes each one. Columns are flat, because every reader can filter on them;
offsets are whole microseconds from `arrival`.
"""

from typing import Final

import msgspec
import pyarrow as pa

from llmtap.errors import ConfigError
from llmtap.exchange.outcome import EventClass
from llmtap.user_files import decode_json

VERSION: Final = 1
"""Of the columns and the metadata. A reader takes this and all older ones (`migrate`)."""
META_KEY: Final = b"llmtap"
"""In the schema's metadata, where the CaptureInfo lies as JSON."""
EVENT_CLASS_NAMES: Final = tuple(c.name.lower() for c in EventClass)
"""By code; the column holds the names."""

_string, _int, _small, _bool, _float = pa.string(), pa.int64(), pa.int32(), pa.bool_(), pa.float64()

_COLUMNS: Final[tuple[tuple[str, pa.DataType], ...]] = (
    # Who and when.
    ("capture", _string), ("relay", _string), ("seq", _int), ("id", _string),
    ("arrival_ns", _int), ("arrival", pa.timestamp("us", "UTC")), ("anchor", _small),
    ("tenant", _string), ("model", _string), ("response_model", _string),
    ("route", _string), ("arm", _string), ("unit", _string), ("excluded", _string),
    ("endpoint", _string), ("dialect", _string), ("method", _string), ("path", _string),
    ("request_id", _string), ("trace_parent", _string), ("level", _string),
    # What was asked.
    ("stream", _bool), ("max_tokens", _int), ("temperature", _float), ("top_p", _float), ("n", _small),
    ("tools", _small), ("images", _small), ("response_format", _string),
    ("message_roles", pa.list_(_string)), ("message_bytes", pa.list_(_int)), ("prompt_bytes", _int),
    ("request_bytes", _int),
    ("blocks", pa.list_(_int)), ("block_size", _small), ("block_unit", _string),
    ("slo_ttft_us", _int), ("slo_tpot_us", _int),
    # Whose turn it was.
    ("session", _string), ("session_source", _string), ("turn", _small), ("parent", _string),
    ("think_us", _int), ("turn_by", _string),
    # The timeline: microseconds from arrival.
    ("scheduled_us", _int), ("request_end_us", _int), ("submit_us", _int), ("head_us", _int),
    ("first_byte_us", _int), ("first_any_us", _int), ("first_token_us", _int), ("first_reasoning_us", _int),
    ("first_tool_call_us", _int), ("first_refusal_us", _int), ("first_content_us", _int),
    ("last_token_us", _int), ("response_end_us", _int), ("delivered_us", _int),
    ("paused_us", _int), ("dispatch_late_us", _int),
    ("added_request_us", _int), ("connect_us", _int), ("added_first_chunk_us", _int),
    ("added_chunk_max_us", _int),
    ("clock", _string), ("uncertainty_us", _int), ("uncertain", _bool),
    # Event by event: lists of one length.
    ("event_us", pa.list_(_int)), ("event_class", pa.list_(_string)), ("event_bytes", pa.list_(_int)),
    ("event_tokens", pa.list_(_int)), ("event_flags", pa.list_(pa.uint8())),
    ("server_gap_us", pa.list_(_int)),
    ("reads", _small), ("response_bytes", _int), ("unparsed_events", _int), ("unlogged_events", _int),
    # How it ended.
    ("status", _small), ("outcome", _string), ("finish_reason", _string), ("error", _string),
    ("refusal_kind", _string), ("refusal_source", _string), ("refusal_detail", _string),
    ("refusal_confidence", _string), ("guardrail", _string), ("retries", _small),
    ("resent", _small), ("no_token_reason", _string),
    ("input_tokens", _int), ("input_token_source", _string), ("output_tokens", _int),
    ("reasoning_tokens", _int), ("cached_tokens", _int), ("token_source", _string),
    ("usage", _string), ("server_timing", _string),
    # Only at the level `full`, and redacted.
    ("request_body", _string), ("response_text", _string), ("redactions", _small),
)  # fmt: skip

SCHEMA: Final = pa.schema([pa.field(name, kind) for name, kind in _COLUMNS])
"""All columns are nullable: a foreign trace has few of them."""


class RelayCount(msgspec.Struct, frozen=True, omit_defaults=True):
    """A relay's report on its exchanges."""

    opened: int
    """Exchanges begun: they have the numbers 1 to `opened`."""
    dropped: dict[str, int] = {}
    unsettled: int = 0
    """Under way, or not acknowledged yet."""
    since: int = 0
    """Numbers up to this one, and their drops (`before`), are older than this capture."""
    before: dict[str, int] = {}
    packets: dict[str, int] = {}
    """Of a passive vantage: packets `captured` and `lost`; exchanges in lost packets have no number."""
    watched: dict[str, int] = {}


class CaptureLedger(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known at the end of a file of exchanges that it does not hold."""

    relays: dict[str, RelayCount] = {}
    dropped: dict[str, int] = {}
    """Exchanges that were measured and not kept, by reason, since the meter started."""
    meter: str = ""
    """Run of the meter that counted `dropped`; its last count is valid."""
    closed: bool = False
    """The capture was ended in order: no exchange follows."""


class CaptureInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Metadata of a file, as JSON in the schema's metadata."""

    schema_version: int = VERSION
    capture: str = ""
    """Id of one start of the proxy. Block hashes are comparable within one capture only."""
    tap_version: str = ""
    config: str = ""
    level: str = ""
    """Highest privacy level that a row may have (`options.LEVELS`)."""
    coarse: dict[str, int] = {}
    """Steps of its times, sizes and counts at the level `coarse` (`privacy/coarse.py`)."""
    tokenizer: str | None = None
    block_unit: str = ""
    block_size: int = 0
    arrivals: str = "wall"
    """`wall`: `arrival_ns` counts from 1970 UTC. `trace`: from the trace's own zero."""
    blocks: str = "salted"
    """`salted`: keyed hashes. `trace`: ids from the source."""
    source: str = ""
    """Format that the rows were converted from; empty for live traffic."""
    began_ns: int = 0
    ledger: CaptureLedger = CaptureLedger()
    damaged: dict[str, int] = {}


def with_info(schema: pa.Schema, info: CaptureInfo) -> pa.Schema:
    """Return the schema with `info` in its metadata."""
    return schema.with_metadata({META_KEY: msgspec.json.encode(info)})


def info_of(schema: pa.Schema) -> CaptureInfo | None:
    """Return the metadata of a file; None if it is no capture of ours. Raises msgspec.MsgspecError."""
    raw = (schema.metadata or {}).get(META_KEY)
    return None if raw is None else decode_json(raw, CaptureInfo)


class CaptureVersionError(ConfigError):
    """A capture is newer than this llmtap."""

    def __init__(self, where: str, version: int) -> None:
        super().__init__(
            where, f"schema version {version}, and this llmtap reads up to {VERSION}",
            "read it with the llmtap that wrote it, or a newer one",
        )  # fmt: skip
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
