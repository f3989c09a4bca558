"""The meter's options, each with the line of help that flags, config file and reference page show."""

from ipaddress import ip_address
from typing import Annotated, Literal

from msgspec import Meta, Struct

from llmtap.errors import ConfigError
from llmtap.units import NS_PER_S, Duration

__all__ = ["MeterOptions", "split_address"]


class MeterOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the analysis plane counts, keeps and shows. Raises ConfigError for what cannot be."""

    admin: Annotated[
        str, Meta(description="Address of the admin port (metrics, health, API); loopback needs no token.")
    ] = "127.0.0.1:9464"
    admin_token: Annotated[
        str | None,
        Meta(description="Bearer token that the admin port asks for; required when it is not on loopback."),
    ] = None
    window: Annotated[
        Duration, Meta(description="Length of the rolling summary window; kept in twelve slices.")
    ] = Duration(60 * NS_PER_S)
    exchanges_kept: Annotated[
        int, Meta(ge=0, description="Newest exchanges kept in memory for the API, with their events.")
    ] = 1_000
    models_max: Annotated[
        int, Meta(ge=1, description="Model names that get series of their own; the rest is `other`.")
    ] = 100
    tenants_max: Annotated[
        int, Meta(ge=1, description="Tenant names that get series of their own; the rest is `other`.")
    ] = 1_000
    priority: Annotated[
        Literal["normal", "idle"],
        Meta(description="`idle`: the meter runs only where relays and others leave CPU, and may starve."),
    ] = "normal"

    def __post_init__(self) -> None:
        host, _ = split_address(self.admin, "meter.admin")
        if self.window < NS_PER_S:
            raise ConfigError("meter.window", f"{self.window / NS_PER_S:g} s is too short", "use at least 1s")
        if self.admin_token is None and not _is_loopback(host):
            raise ConfigError(
                "meter.admin_token",
                f"required because the admin address {self.admin} can be reached from other machines",
                "set a long random token, or bind to 127.0.0.1",
            )
        if self.admin_token is not None and not (self.admin_token.isascii() and self.admin_token.strip()):
            raise ConfigError(
                "meter.admin_token", "must be visible ASCII characters", "try: openssl rand -hex 24"
            )


def split_address(text: str, place: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:9464`, `localhost:9464` or `[::1]:9464`.

    Raises ConfigError, naming `place`, when the text is no such address.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(place, f"expected HOST:PORT, got {text!r}", "write [::1]:9464 for IPv6")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise ConfigError(place, f"port {port!r} is not a number from 0 to 65535")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name: nobody can say where it points tomorrow
        return False
