"""TLS of the admin port, whose certificate may be renewed while it is in use."""

import asyncio
import logging
import os
import ssl
from typing import Final

from llmtap.errors import ConfigError
from llmtap.meter.options import MeterOptions
from llmtap.net.tls import server_context

__all__ = ["AdminTls"]

LOOK_S: Final = 30.0
"""Between two looks at the files: who renews them does so days before it matters."""

log = logging.getLogger(__name__)


class AdminTls:
    """The context that new connections use, and the files it is made of."""

    def __init__(self, certificate: str, key: str) -> None:
        """Raises ConfigError that names the file at fault."""
        self._files = (certificate, key)
        self._seen = self._look()
        self.context: ssl.SSLContext = server_context(certificate, key, "meter.admin_tls_")

    @classmethod
    def of(cls, options: MeterOptions) -> "AdminTls | None":
        """None where the port speaks in the clear."""
        if options.admin_tls_certificate is None or options.admin_tls_key is None:
            return None
        return cls(options.admin_tls_certificate, options.admin_tls_key)

    async def renew(self) -> None:
        """Read the files again whenever they change; never ends. A pair that does not fit (the one file is
        written, the other not yet) leaves what was there, and is looked at again."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Once. Whether something new is in use."""
        seen = self._look()
        if seen == self._seen:
            return False
        try:
            # Tried apart first: what OpenSSL has half taken it does not give back.
            server_context(*self._files, "meter.admin_tls_")
            self.context.load_cert_chain(*self._files)
        except (ConfigError, OSError) as exc:
            log.warning("event=admin_tls_not_renewed error=%r", str(exc))
            return False
        self._seen = seen
        log.info("event=admin_tls_renewed")
        return True

    def _look(self) -> tuple[tuple[int, int], ...]:
        found = []
        for name in self._files:
            try:
                about = os.stat(name)
            except OSError:
                found.append((0, 0))
            else:
                found.append((about.st_ino, about.st_mtime_ns))
        return tuple(found)
