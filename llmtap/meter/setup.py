"""Parameters of a meter process (one line of JSON at its start), and control messages on its stdin.

The supervisor writes a `MeterSetup` and the messages, `process.py` and `shutdown.py` read them.
`check_no_meter_listens` checks that no other meter listens on a socket. This module does not import the rest
of the meter, which saves 19 MB in the supervisor.
"""

import os
import socket
import stat
from typing import Final

import msgspec

from llmtap.capture.options import CaptureOptions
from llmtap.channel import SOCKET_PATH_BYTES_MAX
from llmtap.channel.experiment import Experiment
from llmtap.errors import ConfigError
from llmtap.export.options import OtlpOptions
from llmtap.log import LogSetup
from llmtap.meter.options import CostOptions, MeterOptions, PairOptions, TenantOptions
from llmtap.metrics.slo import SloOptions
from llmtap.protocol.dialects.table.declaration import DialectTable

SETTINGS_LINE: Final = b"from now on "
"""Beginning of a line on the stdin of a running meter, followed by a Changeable as JSON."""
HANDOVER_LINE: Final = b"another meter takes over at "
"""Beginning of a line on stdin, followed by the state folder of the other meter. It is no signal, because a
signal can reach the whole process group. Later versions must keep this beginning: a meter that does not know
the line would not end after its relays, and would be killed. A meter of an older version expects the path of
a socket instead of the folder; it cannot connect, and ends without a handover."""
CAPTURE_END_LINE: Final = b"the other meter has another capture"
"""Line on stdin before HANDOVER_LINE, if the other meter does not continue the capture of this meter."""
PROBE_S: Final = 1.0
"""Time limit of the connection that shows whether a meter listens. The kernel accepts it in microseconds."""


class Changeable(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a running meter can change; a change of any other setting needs a new meter."""

    log: LogSetup = LogSetup()
    config: str = ""
    """Fingerprint of the configuration, which is written into the metadata of the capture."""
    drain_s: float = 30.0
    """Time limit for the relays to finish their streams before the meter ends."""


class MeterSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a meter process, from its start to its end."""

    options: MeterOptions
    socket: str
    """Path of the socket for relays."""
    admin_fd: int | None = None
    """Listening socket of the admin port; None: bind `options.admin`."""
    changeable: Changeable = Changeable()
    """Settings that a reload can change."""
    experiment: Experiment | None = None
    otlp: OtlpOptions = OtlpOptions()
    tenants: TenantOptions = TenantOptions()
    salt: str = ""
    """Key of the hashes that replace secret names of tenants and API keys."""
    slo: dict[str, SloOptions] = {}
    cost: CostOptions = CostOptions()
    pair: PairOptions | None = None
    """Options of pairing; None: no exchanges are paired."""
    dialects: dict[str, DialectTable] = {}
    servers: dict[str, tuple[str, int]] = {}
    """By arm ("": all other exchanges): host and port of the upstream. Empty if no export needs them."""
    back_server: tuple[str, int] | None = None
    """Host and port of the engine behind a gateway; None: there is none, or no export needs it."""
    capture: CaptureOptions = CaptureOptions()
    capture_id: str = ""
    """Name of the capture, the same after a restart of the meter."""
    capture_salt: str = ""
    """Key of the hashes in a capture, in hex. All meters of one capture have it, and no file contains it."""
    capture_after: int = 0
    """Number of the latest relay that was started before this capture. The recorder does not count earlier
    exchanges of these relays as missing rows. 0 for all meters of the capture except the first."""
    state: str = ""
    """State folder; empty: no state outlives the meter."""
    takes_over: bool = False
    """Whether another meter keeps the admin port and the state until a relay of this meter is ready."""

    def serves(self, wanted: "MeterSetup") -> bool:
        """Return whether a meter with this setup can continue with `wanted`: only `changeable` differs."""
        return _fixed_settings(self) == _fixed_settings(wanted)


def _fixed_settings(setup: MeterSetup) -> dict[str, object]:
    """Return settings that a running meter cannot change, without `options.admin` if it inherits a socket."""
    settings = msgspec.structs.asdict(setup)
    # `capture_after` and `takes_over` matter only at the start of a meter.
    for name in ("changeable", "capture_after", "takes_over"):
        del settings[name]
    if setup.admin_fd is not None:
        settings["options"] = {**msgspec.structs.asdict(setup.options), "admin": None}
    return settings


def check_socket_path(path: str) -> None:
    """Raise ConfigError if a socket cannot be made at `path`."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError("meter.socket", f"there is no folder {folder}", f"run install -d -m 700 {folder}")
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            "meter.socket",
            f"{path} is longer than {SOCKET_PATH_BYTES_MAX} bytes, the limit of the system",
            "use a shorter path",
        )
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(
            "meter.socket", f"{path} exists and is not a socket", "use another path, or remove this file"
        )


def check_no_meter_listens(path: str) -> None:
    """Raise ConfigError if a meter listens at `path`: a second one would replace it."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except TimeoutError:
            pass  # a meter listens, but is too busy to accept the connection
        except OSError:
            return
    raise ConfigError("meter.socket", f"another meter listens at {path}", "use another path for this meter")
