"""Options of the passive vantage (`[watch]`): interfaces, ports and hosts of packets, skipped requests."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from llmtap.options.fields import opt
from llmtap.protocol.inference import NOT_INFERENCE
from llmtap.units import Bytes


class WatchOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that select the packets to read."""

    interfaces: Annotated[tuple[str, ...], opt("Network interfaces to read packets from, or `any`.")] = ()
    ports: Annotated[tuple[Annotated[int, Meta(ge=1, le=65_535)], ...], opt("TCP ports of the servers.")] = ()
    upstream_hosts: Annotated[
        tuple[str, ...],
        opt(
            "IP addresses of the servers; needed only if clients can use one of `ports` as their source port."
        ),
    ] = ()
    timestamps: Annotated[
        Literal["kernel", "adapter"],
        opt("Clock that stamps received packets: the kernel's, or the network card's (`adapter`)."),
    ] = "kernel"
    skip: Annotated[
        tuple[str, ...], opt("Requests that are not inference, as for `relay.skip`: counted, not measured.")
    ] = NOT_INFERENCE
    ring_bytes: Annotated[Bytes, opt("Size of the kernel's packet buffer per interface.")] = Bytes(64 << 20)
    tap_bytes: Annotated[Bytes, opt("Maximum bytes of frames waiting for the meter.")] = Bytes(32 << 20)
    user: Annotated[
        str | None, opt("User to switch to after the packet sockets are open (default: no switch).")
    ] = None
