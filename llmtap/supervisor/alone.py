"""Run `llmtap meter`: one process that measures applications with the middleware, without relays.

`alone_problems` checks the settings. `run_meter` opens the unix socket for the applications and the admin
port, and calls `serve` of `meter/process.py`.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator

from llmtap.channel import is_socket_replaceable
from llmtap.config import Settings
from llmtap.errors import ConfigError
from llmtap.log import set_up
from llmtap.meter.pipeline.receiver import listen_on
from llmtap.meter.process import serve
from llmtap.meter.setup import check_no_meter_listens
from llmtap.net.listener import name_of
from llmtap.supervisor.checks import meter_problems
from llmtap.supervisor.ports import bind_for
from llmtap.supervisor.run import fresh_meter_setup

log = logging.getLogger(__name__)


def alone_problems(settings: Settings, *, in_use: bool = False) -> Iterator[ConfigError]:
    """Yield the mistakes in the settings of `llmtap meter`. `in_use`: see `checks.problems_of`."""
    if settings.meter.socket is None:
        yield ConfigError(
            "meter.socket",
            "the path that applications connect to is missing",
            "set it with --listen-socket PATH",
        )
    if settings.experiment.enabled:
        yield ConfigError(
            "experiment.enabled",
            "is true, but only the relays of `llmtap proxy` can assign requests to arms",
            "set it to false, or use `llmtap proxy`",
        )
    yield from meter_problems(settings, in_use=in_use)


def run_meter(settings: Settings, announce: Callable[[str, str], None]) -> None:
    """Run the meter until SIGTERM, Ctrl-C or a hang-up of the terminal. `announce` is called with the path of
    the socket and the address of the admin port, as soon as both are open.

    The caller has checked the settings by `alone_problems`. Raises ConfigError.
    """
    path = settings.meter.socket
    assert path is not None
    check_no_meter_listens(path)
    (admin,) = bind_for("meter.admin", settings.meter.admin, 1)
    address = name_of(admin)
    sock = _listen_at(path)
    set_up(settings.log)
    if is_socket_replaceable(path):
        log.warning("event=meter_socket_exposed socket=%s hint=%r", path, "chmod 700 its directory")
    serve(fresh_meter_setup(settings, path, admin.detach()), sock, lambda: announce(path, address))


def _listen_at(path: str) -> socket.socket:
    try:
        return listen_on(path)
    except OSError as exc:
        hint = None
        if isinstance(exc, PermissionError):
            hint = (
                f"create a directory that belongs to this user: install -d -m 700 -o {os.geteuid()} DIRECTORY"
            )
        raise ConfigError("meter.socket", f"cannot listen at {path}: {exc.strerror or exc}", hint) from None
