"""Where the admin port is, whatever a reload says: the rules of that address hold."""

import socket

import pytest

from llmtap.config import load_settings
from llmtap.errors import ConfigError
from llmtap.supervisor.ports import Ports

OPEN = "0.0.0.0:9464"
TOKEN = {"meter.admin_token": "a" * 48, "meter.admin_plaintext": "true"}


@pytest.mark.parametrize("handed", [False, True])
def test_a_port_for_everybody_is_not_served_without_a_token_because_the_settings_name_another(
    monkeypatch: pytest.MonkeyPatch, handed: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as admin:
        monkeypatch.setattr("llmtap.supervisor.ports.name_of", lambda sock: OPEN)
        ports = Ports([], admin, None, None if handed else OPEN)
        with pytest.raises(ConfigError, match=r"meter\.admin_token"):
            ports.check_admin(load_settings(None, {}, {"meter.admin": "127.0.0.1:9464"}))
        ports.check_admin(load_settings(None, {}, {"meter.admin": "127.0.0.1:9464"} | TOKEN))
