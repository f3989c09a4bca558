"""Check a configuration (addresses, files, certificates, contradictions) before it is used.

`check_settings` raises one ConfigError with all mistakes in a proxy's settings; `warnings_of` yields probable
mistakes. `alone.py` and `watching.py` use `meter_problems` for their commands.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from llmtap.capture.tokenizer import load_tokenizer
from llmtap.config import Settings
from llmtap.errors import ConfigError, errors_of_check, raise_all
from llmtap.meter.options import MeterOptions
from llmtap.meter.setup import check_socket_path
from llmtap.net.listener import parse_address
from llmtap.net.pool import Origin, parse_origin
from llmtap.net.tls import client_context, server_context
from llmtap.protocol.inference import SkipRules
from llmtap.vantage.relay.options import RelayOptions

_OWN_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", ""})
"""Host names of this machine. Two URLs with the same port, and with any two of these names, lead to the same
server."""


def check_settings(settings: Settings) -> None:
    """Raise one ConfigError for all mistakes in a proxy's settings (`problems_of`)."""
    raise_all(problems_of(settings))


def check_meter(settings: Settings) -> None:
    """Raise one ConfigError for all mistakes in the settings of a meter (`meter_problems`)."""
    raise_all(meter_problems(settings))


def problems_of(
    settings: Settings, supervisor: int | None = None, *, in_use: bool = False
) -> Iterator[ConfigError]:
    """Yield the mistakes in the settings of a proxy.

    Args:
        supervisor: process id of the proxy's supervisor, if it is not this process.
        in_use: whether a running llmtap can use the same settings; then a capture of another process in the
            same folder is no mistake.
    """
    if settings.pair.back_ports:
        hint = "set pair.upstream and pair.listen for a relay, or use llmtap watch"
        yield ConfigError("pair.back_ports", "is for llmtap watch, and a proxy watches no ports", hint)
    yield from relay_problems(settings)
    yield from meter_problems(settings, supervisor, in_use=in_use)
    if settings.experiment.enabled and not settings.experiment.arms:
        yield ConfigError(
            "experiment.arms", "is empty, but experiment.enabled is true", "add at least two arms"
        )


def relay_problems(settings: Settings) -> Iterator[ConfigError]:
    """Yield the mistakes in the settings of the relays."""
    relay = settings.relay
    listen = admin = None
    try:
        listen = parse_address(relay.listen, "relay.listen")
        admin = parse_address(settings.meter.admin, "meter.admin")
        if listen[1] and listen == admin:
            yield ConfigError("meter.admin", "is the address of the proxy (relay.listen)", "use another port")
    except ConfigError as exc:
        yield exc
    urls = {"relay.upstream": relay.upstream} | {
        f"experiment.arms[{i}].upstream": arm.upstream
        for i, arm in enumerate(settings.experiment.arms)
        if arm.upstream is not None
    }
    if not relay.upstream:
        hint = "give --upstream http://HOST:PORT, or set LLMTAP_RELAY_UPSTREAM"
        yield ConfigError("relay.upstream", "the gateway's URL is missing", hint)
        del urls["relay.upstream"]
    if settings.pair.upstream:
        yield from back_relay_problems(settings, {"relay.listen": listen, "meter.admin": admin})
    for place, url in urls.items():
        try:
            origin = parse_origin(url, place)
        except ConfigError as exc:
            yield exc
            continue
        if listen is not None and _is_same(origin, listen):
            yield ConfigError(
                place,
                "is the address of the proxy (relay.listen): the proxy would forward requests to itself",
                "set the URL of the gateway, and another port in relay.listen if the gateway is on this host",
            )
        elif admin is not None and _is_same(origin, admin):
            yield ConfigError(
                place, "is the admin port of llmtap (meter.admin)", "set the URL of the gateway"
            )
        if place == "relay.upstream" and (origin.tls or relay.upstream_ca):
            yield from errors_of_check(client_context, relay.upstream_ca, relay.upstream_verify)
    if bool(relay.tls_certificate) != bool(relay.tls_key):
        given, missing = ("certificate", "key") if relay.tls_certificate else ("key", "certificate")
        yield ConfigError(
            f"relay.tls_{given}",
            f"is set, but relay.tls_{missing} is missing",
            "set both for TLS, or neither",
        )
    if relay.tls_certificate and relay.tls_key:
        yield from errors_of_check(server_context, relay.tls_certificate, relay.tls_key)
    yield from errors_of_check(SkipRules, relay.skip, "relay.skip")


def back_relay_problems(
    settings: Settings, taken: Mapping[str, tuple[str, int] | None]
) -> Iterator[ConfigError]:
    """Yield the mistakes in the settings of the relay between a gateway and its engine. `taken`: addresses of
    other sockets of llmtap, by option."""
    pair = settings.pair
    try:
        listen = parse_address(pair.listen, "pair.listen")
        origin = parse_origin(pair.upstream, "pair.upstream")
    except ConfigError as exc:
        yield exc
        return
    for key, address in {**taken, "pair.listen": listen}.items():
        if key != "pair.listen" and listen[1] and listen == address:
            yield ConfigError("pair.listen", f"is the address of {key}", "use another port")
        if address is not None and _is_same(origin, address):
            hint = "set the URL of the engine behind the gateway"
            yield ConfigError("pair.upstream", f"is the address of {key}", hint)
    if origin.tls or settings.relay.upstream_ca:
        yield from errors_of_check(client_context, settings.relay.upstream_ca, settings.relay.upstream_verify)


def _is_same(origin: Origin, address: tuple[str, int]) -> bool:
    """Return whether a URL leads to this address, possibly by another name of this host."""
    host, port = address
    hosts = {origin.host, host}
    return origin.port == port and (len(hosts) == 1 or hosts <= _OWN_HOSTS)


def warnings_of(settings: Settings) -> Iterator[str]:
    """Yield probable mistakes in valid settings of a proxy."""
    ports = [parse_address(at, "")[1] for at in (settings.relay.listen, settings.meter.admin)]
    defaults = [parse_address(at, "")[1] for at in (RelayOptions().listen, MeterOptions().admin)]
    if ports == defaults[::-1]:
        yield (
            f"relay.listen has the default port of meter.admin ({ports[0]}), and meter.admin that of"
            f" relay.listen ({ports[1]})\n"
            "hint: exchange the two addresses, unless clients and monitoring expect them so"
        )
    prefix = parse_origin(settings.relay.upstream, "relay.upstream").prefix.decode()
    if prefix.endswith("/v1"):
        yield (
            f"relay.upstream ends in {prefix}, which is added before the path of each request: /v1/models"
            f" becomes {prefix}/v1/models\n"
            f"hint: remove {prefix} from relay.upstream, unless clients send paths without /v1"
        )


def meter_problems(
    settings: Settings, supervisor: int | None = None, *, in_use: bool = False
) -> Iterator[ConfigError]:
    """Yield the mistakes in the settings of a meter, in any command. Parameters: as in `problems_of`."""
    meter = settings.meter
    if meter.admin_tls_certificate and meter.admin_tls_key:
        tls = (meter.admin_tls_certificate, meter.admin_tls_key, "meter.admin_tls_")
        yield from errors_of_check(server_context, *tls)
    if meter.socket is not None:
        yield from errors_of_check(check_socket_path, meter.socket)
    if settings.cost.gpu_hour and not settings.cost.gpus:
        yield ConfigError("cost.gpus", "is 0, but cost.gpu_hour has a price", "set the number of GPUs")
    if settings.capture.level == "full" and settings.capture.to is None:
        hint = "set capture.to, or give --capture DIR"
        yield ConfigError("capture.to", "is not set, but capture.level is full: nothing is captured", hint)
    if meter.tokenizer is not None:
        yield from errors_of_check(load_tokenizer, meter.tokenizer)
    if settings.capture.to is not None:
        # Import it here, because Arrow takes 40 MB and 200 ms, and only captures need it.
        from llmtap.capture.store.store import check_folders

        yield from errors_of_check(check_folders, settings.capture, supervisor, in_use)
