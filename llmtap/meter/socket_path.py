"""The path at which a meter listens: whether it can, and whether another does already."""

import os
import socket
import stat
from typing import Final

from llmtap.channel.channel import SOCKET_PATH_BYTES_MAX
from llmtap.errors import ConfigError

__all__ = ["check_socket_path", "need_no_meter"]

PROBE_S: Final = 1.0
"""How long a meter may take to let a caller in; the kernel does so for it in microseconds."""


def check_socket_path(path: str) -> None:
    """Raises ConfigError when no meter could ever listen at `path`."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError("meter.socket", f"there is no folder {folder}")
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError("meter.socket", f"is longer than {SOCKET_PATH_BYTES_MAX} bytes, the system's limit")
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError("meter.socket", f"{path} is there, and is no socket")


def need_no_meter(path: str) -> None:
    """Raises ConfigError when somebody listens at `path`: a second meter would take it from the first."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except TimeoutError:
            pass  # too busy to accept, and so there
        except OSError:
            return
    raise ConfigError("meter.socket", f"another meter listens at {path}", "one path for each meter")
