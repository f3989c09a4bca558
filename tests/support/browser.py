"""A headless Chromium, driven over the DevTools protocol: what a page says, asks for and looks like."""

import asyncio
import atexit
import base64
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.support.waiting import wait_until

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
"""None where there is none: tests are skipped then."""
FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_KEYS: Final = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    " ": (32, " "),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
}
"""Virtual key code, and text that the key types: without the code a browser does nothing of its own."""
_SHIFT: Final = 8
START_S: Final = 60.0
ANSWER_S: Final = 60.0
STOP_S: Final = 15.0


class Page:
    """One tab."""

    def __init__(self, browser: "Browser", session: str, target: str) -> None:
        self._browser = browser
        self.session = session
        self.target = target
        self.problems: list[str] = []
        """What the console was told of errors and warnings, and exceptions that nobody caught."""
        self.requests: list[str] = []
        """URLs of all that was asked for."""

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.send(method, params, self.session)

    async def open(self, url: str) -> None:
        """Goes there; returns when it is on its way."""
        await self.send("Page.navigate", url=url)

    async def look(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        failed = answer.get("exceptionDetails")
        assert failed is None, f"{expression}: {failed}"
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60.0) -> None:
        """Until the expression is true; while the page is being loaded it may not even be possible."""
        wrong = ""

        async def holds() -> bool:
            nonlocal wrong
            try:
                return bool(await self.look(f"!!({expression})"))
            except AssertionError as exc:
                wrong = str(exc)
                return False

        try:
            await wait_until(holds, seconds, hint=lambda: f"{expression}\n{wrong}\n{self.problems}")
        except AssertionError as exc:
            shown = await self.look("document.body?.innerText?.slice(0, 1500)")
            raise AssertionError(f"{exc}\n{shown}") from None

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as a keyboard sends it."""
        code, text = _KEYS.get(key, (0, key if len(key) == 1 else ""))
        about: dict[str, Any] = {"key": key, "modifiers": _SHIFT if shift else 0}
        if code:
            about |= {"code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        await self.send("Input.dispatchKeyEvent", **about, **down)
        await self.send("Input.dispatchKeyEvent", **about, type="keyUp")

    async def mouse(self, kind: str, x: float, y: float, **about: Any) -> None:
        """An event of the mouse at a place of the window: mouseMoved, mousePressed or mouseReleased."""
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **about)

    async def screen(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """As on a screen of this size."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        await self.send(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                {"name": "prefers-reduced-motion", "value": "reduce"},  # what moves is never still
            ],
        )

    async def picture(self, path: Path) -> None:
        """What is seen, as PNG."""
        answer = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    def heard(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                words = (str(arg.get("value", arg.get("description"))) for arg in params["args"])
                self.problems.append(" ".join(words))
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])


class Browser:
    """A profile of the process, by a connection of its own."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._number = 0
        self.profile = ""
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        told = {"id": self._number, "method": method, "params": params}
        if session is not None:
            told["sessionId"] = session
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps(told))
        async with asyncio.timeout(ANSWER_S):
            return await answer

    async def page(self) -> Page:
        """A new tab, empty."""
        about = {"url": "about:blank", "browserContextId": self.profile}
        target = (await self.send("Target.createTarget", about))["targetId"]
        attached = await self.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"], target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.send(f"{domain}.enable")
        return page

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if answer.done():
                    continue
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]["message"]))
                else:
                    answer.set_result(told["result"])
            elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                page.heard(told["method"], told["params"])

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading


class _Process:
    """Chromium with a fresh home; `stop` ends it with all of its children."""

    def __init__(self, *flags: str) -> None:
        assert CHROMIUM is not None
        self._home = home = tempfile.mkdtemp(prefix="browser-")
        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={self._home}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home},
        )
        self.url = ""

    async def ready(self) -> str:
        """Return the address of its DevTools."""

        def address() -> str:
            with contextlib.suppress(FileNotFoundError):
                lines = (Path(self._home) / "DevToolsActivePort").read_text().splitlines()
                if len(lines) == 2:
                    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            code = self._process.poll()
            assert code is None, f"the browser ended with {code}"
            return ""

        self.url = self.url or await wait_until(address, START_S)
        return self.url

    def stop(self) -> None:
        # All of its processes are in the group that it leads.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)


@functools.cache
def _shared() -> _Process:
    """The one process of this test run."""
    process = _Process()
    atexit.register(process.stop)
    return process


@asynccontextmanager
async def browser(*flags: str) -> AsyncIterator[Browser]:
    """A browser that remembers nothing: a profile of its own in the shared process, gone at the end.

    With flags it is a process of its own.
    """
    process = _Process(*flags) if flags else _shared()
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(await process.ready(), max_msg_size=0, autoping=True) as socket,
        ):
            running = Browser(socket)
            try:
                running.profile = (await running.send("Target.createBrowserContext", {}))["browserContextId"]
                yield running
                await running.send("Target.disposeBrowserContext", {"browserContextId": running.profile})
            finally:
                await running.close()
    finally:
        if flags:
            process.stop()
