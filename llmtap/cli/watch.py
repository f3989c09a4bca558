"""`llmtap watch`: measure plaintext HTTP/1.1 traffic from its packets, without a proxy.

Packets come from a network interface (`supervisor/watching.py`), or from the file of `--read`. The command
prints a summary of the file.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer
from msgspec import Struct

from llmtap.cli.flags import command
from llmtap.cli.main import app
from llmtap.cli.options import Json, SettingsOptions
from llmtap.cli.shared import print_json, print_message, print_rich, stoppable
from llmtap.cli.tap import announce
from llmtap.errors import ConfigError
from llmtap.options.fields import opt

if TYPE_CHECKING:
    from llmtap.config import Settings
    from llmtap.vantage.passive.file_vantage import FileVantage

_EPILOG = """Examples:

  llmtap watch --interface eth0 --port 8000

  llmtap watch --interface lo --interface eth0 --port 8000,8001 --capture ./capture

  llmtap watch --read traffic.pcap --port 8000; llmtap inspect traffic.pcap

  ssh gpu-7 tcpdump -i any -s 0 -U -w - tcp port 8000 | llmtap watch --read -

Without --read, the command runs until Ctrl-C. It requires root or CAP_NET_RAW, and drops this privilege when
the packet sockets are open. Only HTTP/1.1 without TLS is measured; TLS and HTTP/2 connections are counted. An
exchange with a missing packet is dropped and counted. --json requires --read.

Exit codes: 0 stopped by a signal, or the file was read; 1 the file is damaged, and the packets before the
damage were measured; 2 invalid option, missing permission, or not a packet capture."""


def _read_ports(texts: list[str]) -> list[int]:
    """Return the port numbers of --port. Raises ConfigError."""
    ports = []
    for text in ",".join(texts).split(","):
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 65_536):
            hint = "such as --port 8000,8001"
            raise ConfigError("--port", f"expected a port number from 1 to 65535, got {text!r}", hint)
        ports.append(int(text))
    return ports


class _WatchOptions(Struct, frozen=True, kw_only=True):
    """Options of this command, in addition to those of the configuration."""

    interface: Annotated[
        list[str] | None,
        opt(
            "Network interface, or `any`; may be repeated. Required without --read.",
            "IF",
            key="watch.interfaces",
        ),
    ] = None
    port: Annotated[
        list[int] | None,
        opt(
            "TCP port of the server; may be repeated. Required without --read; default with --read: all "
            "ports.",
            "N[,N]",
            key="watch.ports",
            parse=_read_ports,
        ),
    ] = None
    upstream_host: Annotated[
        list[str] | None,
        opt(
            "IP address of the server; may be repeated. Needed only if a client can use one of the --port "
            "numbers as its own source port, because the server is then not recognised by its port.",
            "IP",
            key="watch.upstream_hosts",
        ),
    ] = None
    read: Annotated[
        str | None,
        opt("Packet capture (pcap or pcapng) to read instead of an interface; - is standard input.", "FILE"),
    ] = None
    timestamps: Annotated[
        str | None,
        opt(
            "Clock that stamps received packets: of the kernel (default), or of the network adapter.",
            "kernel|adapter",
            key="watch.timestamps",
        ),
    ] = None
    json: Json = None


@command(app, short_help="Measure traffic from network packets, without a proxy.", epilog=_EPILOG)
def watch(options: _WatchOptions, configuration: SettingsOptions) -> None:
    """Measure plaintext HTTP/1.1 from the packets of a network interface or a packet capture file."""
    from llmtap.config import fingerprint
    from llmtap.supervisor.checks import meter_problems
    from llmtap.supervisor.watching import packet_problems, watch_problems
    from llmtap.supervisor.watching import watch as run

    loaded, check = configuration.read(options), configuration.check
    settings = loaded.settings
    if options.read is not None:
        if options.interface:
            raise ConfigError("--read", "cannot be combined with --interface", "use only one of them")
        for name, value in (("--admin", configuration.admin), ("--timestamps", options.timestamps)):
            if value is not None:
                raise ConfigError(name, "cannot be combined with --read", f"leave out {name}")
        settings = loaded.settings_or_raise(packet_problems(settings), meter_problems(settings, in_use=check))
        if check:
            print(f"ok (config {fingerprint(settings)})")
        else:
            _measure_file(settings, options.read, json=options.json)
        return
    if options.json is not None:
        raise ConfigError(
            "--json", "requires --read", "for a running llmtap, read /api/v1/summary of its admin port"
        )
    problems = [watch_problems(settings), packet_problems(settings)]
    if check:
        loaded.settings_or_raise(*problems, meter_problems(settings, in_use=True))
        print(f"ok (config {fingerprint(settings)})")
        return
    loaded.settings_or_raise(*problems)
    first_line = (
        f"watching {', '.join(settings.watch.interfaces)}, port {', '.join(map(str, settings.watch.ports))}"
    )

    def on_started(listen: str, admin: str) -> None:
        announce(f"{first_line}   relay: {listen}" if listen else first_line, admin, settings)

    raise typer.Exit(run(settings, on_started))


# ---------------------------------------------------------------- packet capture files


def _measure_file(settings: "Settings", name: str, *, json: str | None) -> None:
    """Measure a packet capture file, and print its summary. Raises ConfigError."""
    from llmtap.meter.process import OfflineMeter
    from llmtap.report.summary import render_summary
    from llmtap.supervisor.run import fresh_meter_setup
    from llmtap.vantage.passive.file_vantage import FileVantage

    vantage = FileVantage(settings.watch, lambda frames, now_ns: meter.digest(frames, now_ns))
    meter = OfflineMeter(fresh_meter_setup(settings), vantage.hello)
    with stoppable() as signals:
        signals.handler = vantage.stop
        read_packets(vantage, name)
    summary = meter.finish(vantage.status())
    if json is not None:
        print_json(summary, json)
    else:
        print_rich(render_summary(summary))
    if vantage.cut_at is not None:
        print_message(f"warning: {name}: ends within a packet, at byte {vantage.cut_at:,}")
    if vantage.damage:
        print_message(f"error: {name}: {vantage.damage}; the rest is not measured")
        raise typer.Exit(1)
    if not summary["n"]:
        hint = "is it plaintext HTTP/1.1, whole packets (tcpdump -s 0), and the right --port?"
        print_message(f"warning: no exchange could be measured: {hint}")


def read_packets(vantage: "FileVantage", name: str) -> None:
    """Read all packets of a capture file (`-`: standard input) into `vantage`. Raises ConfigError."""
    from llmtap.vantage.passive.file_vantage import PcapError

    where = "standard input" if name == "-" else name
    try:
        with _open_packets(name) as file:
            vantage.read(file)
    except OSError as exc:
        raise ConfigError(
            where, f"cannot be read: {exc.strerror or exc}", "check the path and its permissions"
        ) from None
    except PcapError as exc:
        raise ConfigError(
            where, str(exc), "to capture packets, use: tcpdump -s 0 -w FILE tcp port N"
        ) from None


def _open_packets(name: str) -> AbstractContextManager[BinaryIO]:
    """Open a packet capture file. If stderr is a terminal, show a progress bar of the bytes read."""
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    if not sys.stderr.isatty():
        return open(name, "rb")
    from rich.console import Console
    from rich.progress import open as open_shown

    shown = open_shown(
        name, "rb", buffering=0, description="reading", console=Console(stderr=True), transient=True
    )
    return _buffered_file(shown)


@contextmanager
def _buffered_file(file: AbstractContextManager[BinaryIO]) -> Iterator[BinaryIO]:
    """Yield the file with a buffer of 1 MiB, because each read redraws the progress bar."""
    with file as raw:
        yield cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, raw), 1 << 20))
