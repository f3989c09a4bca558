"""`llmtap inspect ID --admin URL`: show the parts of one measured exchange's wait for its first token.

The exchange and the parts of its wait come from the admin API, which `llmtap top` uses too.
"""

import asyncio
from typing import Any, Final

from llmtap.cli.shared import print_json, print_line, print_message
from llmtap.errors import ConfigError, LlmtapError
from llmtap.report.first_token import first_token_lines
from llmtap.top.client import Admin, TopOptions, Trouble
from llmtap.top.table import flow_lines
from llmtap.top.views import fact_lines

_WIDTH: Final = 100
"""Maximum number of characters in a line."""


def show_exchange(exchange_id: str, options: TopOptions, *, json: str | None) -> None:
    """Print the newest exchange with this id and the parts of its wait, or JSON. Raises LlmtapError."""
    exchange, first_token = asyncio.run(_fetch(exchange_id, options))
    if json is not None:
        print_json({"exchange": exchange, "first_token": first_token}, json)
        return
    for line in (*flow_lines(fact_lines(exchange), _WIDTH), "", *first_token_lines(first_token)):
        print_line(line)


_IDS: Final = ("id", "request_id", "upstream_request_id", "trace_id")
"""Filters of the API, in the order in which they are tried: the user's id can be any of these."""


async def _fetch(exchange_id: str, options: TopOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    async with Admin(options.url, options.token, options.tls()) as admin:
        try:
            exchange = await _find_exchange(exchange_id, admin)
            first_token = exchange and (await admin.get("first_token", id=exchange["id"])).get("first_token")
        except Trouble as exc:
            hint = "" if exc.hint is None else f". Hint: {exc.hint}"
            raise LlmtapError(f"{options.url}: {exc}{hint}") from None
    if exchange is None or first_token is None:
        raise ConfigError(
            exchange_id,
            f"{options.url} keeps no exchange with this id",
            "it has not ended, or newer exchanges have replaced it (see meter.exchanges_kept); "
            "`llmtap top --once` lists the exchanges",
        )
    return exchange, first_token


async def _find_exchange(exchange_id: str, admin: Admin) -> dict[str, Any] | None:
    for name in _IDS:
        exchanges = (await admin.get("exchanges", **{name: exchange_id}, limit="2")).get("exchanges")
        if exchanges:
            if len(exchanges) > 1:
                print_message(
                    f"warning: several exchanges have the {name} {exchange_id}; the newest is shown"
                )
            newest: dict[str, Any] = exchanges[0]
            return newest
    return None
