"""Debian's Chromium, as people have it: on a desk or in a pocket, light or dark."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path
from typing import Any

from typing_extensions import Self


class Browser:
    """A headless Chromium with one page, for the time of a `with`."""

    def __enter__(self) -> Self:
        # Not before: who leaves these tests out collects this module all the same.
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if browser is None or driver is None:
            raise AssertionError("needs Debian's packages chromium and chromium-driver")
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for argument in (
            "headless=new",
            "no-proxy-server",
            "hide-scrollbars",
            "disable-dev-shm-usage",
        ):
            options.add_argument(f"--{argument}")
        if os.geteuid() == 0:  # for whom Chromium has no sandbox
            options.add_argument("--no-sandbox")
        self._driver = webdriver.Chrome(options=options, service=Service(driver))
        return self

    def __exit__(self, *error: object) -> None:
        self._driver.quit()

    def open(self, url: str) -> None:
        self._driver.get(url)

    def look(self, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Changes the window, and the colours that people prefer; narrow ones are phones."""
        self._driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700},
        )
        self._driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )

    def text(self, selector: str) -> str:
        """What people read of an element; empty if it is hidden."""
        return self._driver.find_element("css selector", selector).text

    def press(self, *keys: str) -> None:
        """Presses keys, whatever has the focus."""
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            self._driver.switch_to.active_element.send_keys(getattr(Keys, key))

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self._driver.execute_script(f"return {expression}")

    def complaints(self) -> list[str]:
        """What the console holds since the last call, but for how often a test reads pixels."""
        messages = [entry["message"] for entry in self._driver.get_log("browser")]
        return [message for message in messages if "getImageData" not in message]

    def save(self, file: Path, *, whole: bool = False) -> None:
        """Writes a picture of what the window shows; or of the whole page."""
        clip = self.ask(
            "{x: 0, y: 0, width: innerWidth, scale: 1, height: %s}"
            % ("document.documentElement.scrollHeight" if whole else "innerHeight")
        )
        taken = self._driver.execute_cdp_cmd(
            "Page.captureScreenshot",
            {"format": "png", "captureBeyondViewport": whole, "clip": clip},
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(taken["data"]))
