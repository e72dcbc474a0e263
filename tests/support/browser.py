"""A headless Chromium, steered through pipes by its DevTools protocol: no driver, no port, no network.

`python -m support.browser PAGE PICTURE [--width 390] [--dark]` writes a picture of a page, as in docs/img.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_TIMEOUT_S = 120.0


class Browser:
    """One page of a browser.

    console  errors and warnings that the page has caused, oldest first
    requests addresses that the page has asked for
    """

    def __init__(self, commands: int, answers: int) -> None:
        """`commands`, `answers`: file descriptors of the pipes to and from Chromium."""
        self._commands, self._answers = commands, answers
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it is complete."""
        scheme = "dark" if dark else "light"
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.console, self.requests = [], []
        self._call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + _TIMEOUT_S
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path, *, is_whole: bool = True) -> None:
        """Write what the page looks like, all of it or the window."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            found = os.read(self._answers, 1 << 16)
            assert found, "Chromium has ended"
            self._unread += found
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.console.append(parameters["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.console.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(str(parameters["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium and end it. Chromium reads commands from descriptor 3 and writes answers to descriptor 4."""
    assert CHROMIUM is not None, "no Chromium; `./missing-packages` names the package"
    commands_in, commands = os.pipe()
    answers, answers_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="cgx_ray-browser-") as profile:
        argv = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        argv += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        argv += [f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        # The shell moves the pipes to the two descriptors, whatever their numbers are here.
        script = f'exec "$@" 3<&{commands_in} 4>&{answers_out}'
        chromium = subprocess.Popen(
            ["bash", "-c", script, "chromium", *argv],
            pass_fds=(commands_in, answers_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_in)
        os.close(answers_out)
        try:
            yield Browser(commands, answers)
        finally:
            # Chromium ends when its pipe does.
            os.close(commands)
            try:
                chromium.wait(timeout=10)
            except subprocess.TimeoutExpired:
                chromium.kill()
                chromium.wait()
            os.close(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900, help="of the window; 0 for the whole page")
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    with open_browser() as browser:
        browser.open(given.page, width=given.width, height=given.height or 900, dark=given.dark)
        browser.picture(given.picture, is_whole=given.height == 0)


if __name__ == "__main__":
    main()
