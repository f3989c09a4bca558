"""TLS of the admin port (`AdminTls`)."""

import asyncio
import logging
import os
import ssl
from contextlib import suppress
from typing import Final

from llmtap.errors import ConfigError
from llmtap.meter.options import MeterOptions
from llmtap.net.tls import server_context

CHECK_S: Final = 30.0
"""Interval of the check for new certificates; certificates are usually renewed days before they expire."""

log = logging.getLogger(__name__)


class AdminTls:
    """TLS context of the admin port, renewed when the files of certificate and key change."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = (certificate, key)
        self._files_state = self._read_files_state()
        """Inode and modification time of both files, to notice a change."""
        self.context: ssl.SSLContext = server_context(certificate, key, "meter.admin_tls_")

    @classmethod
    def from_options(cls, options: MeterOptions) -> "AdminTls | None":
        """Return the TLS context of the options; None if they set no certificate."""
        if options.admin_tls_certificate is None or options.admin_tls_key is None:
            return None
        return cls(options.admin_tls_certificate, options.admin_tls_key)

    async def renew(self) -> None:
        """Load the files again whenever they change. This coroutine never ends.

        If key and certificate do not match (only one file has been written yet), the old pair stays in use,
        and the next check tries again.
        """
        while True:
            await asyncio.sleep(CHECK_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> bool:
        """Load the files if they changed. Return whether the new pair is in use."""
        state = self._read_files_state()
        if state == self._files_state:
            return False
        try:
            # Try a separate context first: in `self.context`, a new certificate would stay even if its key is
            # refused.
            server_context(*self._files, "meter.admin_tls_")
            self.context.load_cert_chain(*self._files)
        except (ConfigError, OSError) as exc:
            log.warning("event=admin_tls_not_renewed error=%r", str(exc))
            return False
        self._files_state = state
        log.info("event=admin_tls_renewed")
        return True

    def _read_files_state(self) -> list[tuple[int, int]]:
        """Return inode and modification time of each file that exists: a change shows a new certificate."""
        states = []
        for name in self._files:
            with suppress(OSError):
                about = os.stat(name)
                states.append((about.st_ino, about.st_mtime_ns))
        return states
