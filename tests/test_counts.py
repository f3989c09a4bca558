"""Each count of a vantage has its place in the API, its schema and `/metrics`, and only where it applies."""

import pytest
from msgspec.structs import replace

from llmtap.channel.frames import Hello
from llmtap.channel.status import RelayStatus
from llmtap.counts import MIDDLEWARE, PASSIVE, RELAY, CountField, fields_of
from llmtap.export.prometheus.catalogue import SELF
from llmtap.meter.admin.schemas import SCHEMAS
from llmtap.meter.admin.views import relay_values
from llmtap.meter.relays import RelayBook
from tests.support.traffic.relay_status import relay_status

COUNTS = [field for field in fields_of(RelayStatus) if field.kind in (int, dict[str, int])]
HELLO = Hello(relay="r0", pid=7, clock="mono", anchor_mono_ns=0, anchor_wall_ns=0)


@pytest.mark.parametrize("vantage", ["", RELAY, MIDDLEWARE, PASSIVE])
@pytest.mark.parametrize("field", COUNTS, ids=lambda field: field.attribute)
def test_a_count_is_shown_by_the_vantages_that_keep_it(field: CountField, vantage: str) -> None:
    number = 1_500
    book = RelayBook()
    book.join(replace(HELLO, vantage=vantage))
    book.update("r0", relay_status(**{field.attribute: number if field.kind is int else {"k": number}}), 0)
    entry, values = book.to_dict(0)["r0"], relay_values(book.states(0))
    expected = number / 1e9 if "_ns" in field.attribute else number
    applies = (vantage or RELAY) in field.declaration.vantages
    assert isinstance(entry, dict)
    assert entry.get(field.name) == ((expected if field.kind is int else {"k": number}) if applies else None)
    assert field.name in SCHEMAS["Relay"]["properties"]
    if field.declaration.metric is not None:
        shown = values.get(field.declaration.metric, {})
        assert isinstance(shown, dict)
        labels = tuple(filter(None, ("r0", field.declaration.value if field.kind is int else "k")))
        assert len(SELF[field.declaration.metric].labels) == len(labels)
        assert shown.get(labels) == (expected if applies else None)
