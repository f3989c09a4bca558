"""Meter without relays for applications with the middleware: one process, no children."""

import socket
from collections.abc import Callable

from llmtap.config import Settings
from llmtap.errors import ConfigError
from llmtap.log import set_up
from llmtap.meter.pipeline.receiver import listen_on
from llmtap.meter.process import serve
from llmtap.meter.setup import need_no_meter
from llmtap.net.listener import name_of
from llmtap.supervisor.checks import check_measuring
from llmtap.supervisor.ports import bind_for
from llmtap.supervisor.run import fresh_meter_setup

__all__ = ["check_alone", "run_meter"]


def check_alone(settings: Settings) -> str:
    """Check everything but listening; return the socket's path. Raises ConfigError."""
    if settings.meter.socket is None:
        raise ConfigError(
            "meter.socket", "is missing: applications connect to it", "give --listen-socket PATH"
        )
    if settings.experiment.enabled:
        raise ConfigError(
            "experiment.enabled", "needs `llmtap proxy`: its relays deal requests to arms, an app does not"
        )
    check_measuring(settings)
    return settings.meter.socket


def run_meter(settings: Settings, announce: Callable[[str, str], None]) -> None:
    """Run until SIGTERM, Ctrl-C or a hang-up; `announce` gets the socket and the admin port's address.

    Raises ConfigError.
    """
    path = check_alone(settings)
    need_no_meter(path)
    (admin,) = bind_for("meter.admin", settings.meter.admin, 1)
    address = name_of(admin)
    sock = _listen(path)
    set_up(settings.log)
    serve(fresh_meter_setup(settings, path, admin.detach()), sock, lambda: announce(path, address))


def _listen(path: str) -> socket.socket:
    try:
        return listen_on(path)
    except OSError as exc:
        raise ConfigError("meter.socket", f"cannot listen at {path}: {exc.strerror or exc}") from None
