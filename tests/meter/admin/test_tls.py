"""The admin port's certificate: one that is renewed is used, one that does not fit is not."""

import asyncio
import os
import ssl
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from llmtap.errors import ConfigError
from llmtap.meter.admin.tls import AdminTls
from llmtap.meter.options import MeterOptions


class Authority:
    """A CA, and pairs of files that it makes."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"

    def write(self, *, certificate: bool = True, key: bool = True) -> None:
        issued = self.ca.issue_cert("127.0.0.1")
        if certificate:
            self.certificate.write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))
        if key:
            self.key.write_bytes(issued.private_key_pem.bytes())
        # Within the clock's grain two files of one length look alike.
        for file in (self.certificate, self.key):
            about = os.stat(file)
            os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))

    @property
    def options(self) -> MeterOptions:
        return MeterOptions(admin_tls_certificate=str(self.certificate), admin_tls_key=str(self.key))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    found = Authority(tmp_path)
    found.write()
    return found


async def serial(authority: Authority, tls: AdminTls) -> int:
    """Of the certificate that a new connection is shown."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.context)
    await site.start()
    try:
        port = runner.addresses[0][1]
        context = ssl.create_default_context()
        authority.ca.configure_trust(context)
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="127.0.0.1")
        shown = writer.get_extra_info("ssl_object").getpeercert()
        writer.close()
        return int(shown["serialNumber"], 16)
    finally:
        await runner.cleanup()


async def test_a_renewed_certificate_is_shown_to_new_connections(authority: Authority) -> None:
    tls = AdminTls.from_options(authority.options)
    assert tls is not None
    first = await serial(authority, tls)
    assert not tls.reload_if_changed()
    assert await serial(authority, tls) == first
    authority.write()
    assert tls.reload_if_changed()
    second = await serial(authority, tls)
    assert second != first
    # One file is written, the other not yet: what was there stays, and is looked at again.
    authority.write(key=False)
    assert not tls.reload_if_changed()
    assert await serial(authority, tls) == second
    authority.write()
    assert tls.reload_if_changed()
    assert await serial(authority, tls) not in (first, second)


def test_files_that_do_not_fit_name_their_option(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        AdminTls(str(tmp_path / "none"), str(authority.key))
    assert failure.value.place == "meter.admin_tls_certificate"
    with pytest.raises(ConfigError) as failure:
        AdminTls(str(authority.certificate), str(tmp_path / "none"))
    assert failure.value.place == "meter.admin_tls_key"
    authority.write(key=False)
    with pytest.raises(ConfigError, match=r"meter\.admin_tls_certificate.*admin_tls_key"):
        AdminTls.from_options(authority.options)
