"""State of one run of a proxy that outlives its processes (names, secret keys, capture id).

`ProxyRun` makes the RelaySetup and the MeterSetup that the children get. The state continues after a hot
restart, so that captures, experiment arms and relay names stay consistent. `fresh_meter_setup` is for a meter
without relays.
"""

import logging
import os
import secrets
import tempfile
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from llmtap.capture.options import salt_of
from llmtap.channel.experiment import Experiment, resolve
from llmtap.clock import SystemClock
from llmtap.config import Settings, fingerprint
from llmtap.exchange.exchange import BACK, FRONT
from llmtap.meter.setup import Changeable, MeterSetup
from llmtap.meter.tenants import host_salt
from llmtap.net.pool import parse_origin
from llmtap.units import encode_special
from llmtap.vantage.relay.options import RelayOptions
from llmtap.vantage.relay.relay import RelaySetup

log = logging.getLogger(__name__)


def _new_capture_id(wall_ns: int) -> str:
    """Return the id of a capture that begins at `wall_ns`: its date and time, and a random part."""
    began = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return f"{began:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


class ProxyRun(msgspec.Struct, kw_only=True):
    """State that outlives the processes of a proxy. It contains secret keys, so it must not be in a file."""

    id: str
    folder: str
    """Folder of the meter's socket, which the supervisor removes at its end."""
    tenant_salt: str
    """Key of the hashes of tenants."""
    experiment_key: str
    """Key of the hash that assigns units to arms."""
    relays: int = 0
    """Number of relays started so far, for unique names."""
    experiment: Experiment | None = None
    experiment_of: str = ""
    """Digest of the options from which `experiment` was made: if it changes, a new experiment begins."""
    capture_id: str = ""
    """Identifier of the capture."""
    capture_salt: str = ""
    """Salt of the capture's hashes. It is stored only here, so that hashes of different captures cannot be
    compared without `capture.pair_key`."""
    capture_of: str = ""
    """Digest of the options from which the capture was made: if it changes, a new capture begins."""
    capture_met: bool = False
    """Whether a meter has been started for the capture. If so, the next meter continues the capture."""

    @classmethod
    def begin(cls, settings: Settings) -> "ProxyRun":
        """Return the state of a proxy at its first start; a hot restart continues this state instead."""
        run = cls(
            id=secrets.token_hex(2),
            folder=tempfile.mkdtemp(prefix="llmtap-"),
            tenant_salt=host_salt() or secrets.token_hex(16),
            experiment_key=secrets.token_hex(16),
        )
        run.follow(settings)
        return run

    def follow(self, settings: Settings) -> None:
        """Begin a new experiment or a new capture if the settings change its options."""
        digest = _options_digest(settings.experiment)
        if digest != self.experiment_of:
            self.experiment_of = digest
            self.experiment = resolve(settings.experiment, self.experiment_key, SystemClock.wall_ns())
            if self.experiment is not None:
                log.info(
                    "event=experiment name=%s enabled=%s unit=%s arms=%d key_fingerprint=%s",
                    self.experiment.name,
                    self.experiment.enabled,
                    self.experiment.unit,
                    len(self.experiment.arms),
                    self.experiment.key_fingerprint,
                )
        digest = _options_digest(settings.capture)
        if digest != self.capture_of:
            self.capture_of = digest
            self.capture_id = _new_capture_id(SystemClock.wall_ns())
            self.capture_salt = salt_of(settings.capture.pair_key).hex()
            self.capture_met = False

    def catch_up(self, other: "ProxyRun") -> None:
        """Copy from `other` what changes when children start; this object is an older copy of `other`."""
        self.relays = other.relays
        if self.capture_id == other.capture_id:
            self.capture_met = other.capture_met

    def tap_path(self, settings: Settings) -> str:
        """Return the path of the socket on which the meter receives frames."""
        return settings.meter.socket or str(Path(self.folder) / "tap.sock")

    def state_folder(self, settings: Settings) -> str:
        """Return the folder of the meter's state: the configured one, or one that ends with the proxy."""
        return settings.meter.state or str(Path(self.folder) / "state")

    def relay_setup(self, settings: Settings, index: int, number: int, fds: list[int]) -> RelaySetup:
        """Return the setup of relay `index`; `number`: a number that no other relay of this run has."""
        is_back = index >= settings.relay.workers
        return RelaySetup(
            options=back_relay_options(settings) if is_back else settings.relay,
            name=f"{self.id}.{index}.{number}",
            listen_fds=fds,
            tap_path=self.tap_path(settings),
            log=settings.log,
            side=(BACK if is_back else FRONT) if settings.pair.upstream else "",
            # Only the relays in front of the gateway assign arms, so that each request gets only one.
            experiment=None if is_back else self.experiment,
            checks_upstream=index in (0, settings.relay.workers),
        )

    def meter_setup(self, settings: Settings, admin_fd: int, *, takes_over: bool = False) -> MeterSetup:
        # The meter needs the addresses of the servers only for exported totals, which have them as labels.
        exports = settings.otlp.is_enabled(os.environ)
        return _meter_setup(
            settings,
            self.tenant_salt,
            socket=self.tap_path(settings),
            admin_fd=admin_fd,
            capture_id=self.capture_id,
            capture_salt=self.capture_salt,
            experiment=None if self.experiment is None else self.experiment.without_key(),
            servers=_upstream_addresses(settings) if exports else {},
            back_server=_address_of(settings.pair.upstream) if exports and settings.pair.upstream else None,
            capture_after=0 if self.capture_met else self.relays,
            state=self.state_folder(settings),
            takes_over=takes_over,
        )


class RelayPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that determine the sockets and the side of each relay of a generation."""

    front: int
    """Number of relays in front of the gateway."""
    back: int
    """Number of relays behind the gateway, if `upstream` is not empty."""
    upstream: str
    """URL of the engine behind the gateway."""

    @classmethod
    def of(cls, settings: Settings) -> "RelayPlaces":
        pair = settings.pair
        return cls(front=settings.relay.workers, back=pair.workers, upstream=pair.upstream)

    def apply_to(self, settings: Settings) -> Settings:
        """Return `settings` with these numbers of relays, and this engine."""
        return msgspec.structs.replace(
            settings,
            relay=msgspec.structs.replace(settings.relay, workers=self.front),
            pair=msgspec.structs.replace(settings.pair, workers=self.back, upstream=self.upstream),
        )


def relay_count(settings: Settings) -> int:
    """Return the number of relay processes, in front of the gateway and behind it."""
    return settings.relay.workers + (settings.pair.workers if settings.pair.upstream else 0)


def back_relay_options(settings: Settings) -> RelayOptions:
    """Return the options of the relay between gateway and engine: those of the relay in front of the gateway,
    with other addresses and request ids, and without the TLS of clients."""
    pair = settings.pair
    return msgspec.structs.replace(
        settings.relay,
        upstream=pair.upstream,
        listen=pair.listen,
        workers=pair.workers,
        request_id="pass",
        tls_certificate=None,
        tls_key=None,
        upstream_server_name=None,
    )


def _meter_setup(settings: Settings, tenant_salt: str, **own: Any) -> MeterSetup:
    """Return the setup of a meter. `tenant_salt`: key of the tenants' hashes, used if the settings have none.
    `own`: further fields of the setup, in which meters differ."""
    return MeterSetup(
        options=settings.meter,
        changeable=Changeable(
            log=settings.log, config=fingerprint(settings), drain_s=settings.relay.drain_timeout / 1e9
        ),
        otlp=settings.otlp,
        tenants=settings.tenants,
        salt=settings.tenants.salt or tenant_salt,
        slo=settings.slo,
        cost=settings.cost,
        dialects=settings.dialects,
        capture=settings.capture,
        pair=settings.pair if settings.pair.upstream or settings.pair.back_ports else None,
        **own,
    )


def fresh_meter_setup(
    settings: Settings, socket: str = "", admin_fd: int | None = None, *, state: str = ""
) -> MeterSetup:
    """Return the setup of a meter without relays, with new secret keys.

    `socket`: path of the meter's socket; empty for a meter that reads a file. `state`: state folder, used if
    none is configured.
    """
    return _meter_setup(
        settings,
        host_salt() or secrets.token_hex(16),
        socket=socket,
        admin_fd=admin_fd,
        state=settings.meter.state or state,
        capture_id=_new_capture_id(SystemClock.wall_ns()),
        capture_salt=salt_of(settings.capture.pair_key).hex(),
    )


def _options_digest(options: msgspec.Struct) -> str:
    """Return a hash of these options, which changes if an option changes."""
    text = msgspec.json.encode(options, enc_hook=encode_special, order="sorted")
    return blake2b(text, digest_size=8).hexdigest()


def _upstream_addresses(settings: Settings) -> dict[str, tuple[str, int]]:
    """Return by arm host and port of its upstream; "" stands for arms without an upstream of their own."""
    urls = {"": settings.relay.upstream}
    urls |= {arm.name: arm.upstream for arm in settings.experiment.arms if arm.upstream is not None}
    return {arm: _address_of(url) for arm, url in urls.items()}


def _address_of(url: str) -> tuple[str, int]:
    origin = parse_origin(url, "upstream")
    return origin.host, origin.port
