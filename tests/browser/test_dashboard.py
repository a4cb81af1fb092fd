"""The dashboard in a browser, while `rlightning train` runs, loses a service, and ends."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from rlightning.cluster.dashboard import Dashboard
from rlightning.testing import free_address, wait_until
from tests.browser.browser import Browser
from tests.e2e.command import CARTPOLE, Command, settings

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

# `make screenshots` copies what this test leaves here into docs/.
PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
DESK = {"width": 1280, "height": 985}
PHONE = {"width": 390, "height": 844}
# How many pixels of a chart are not empty.
DRAWN = (
    "[...document.querySelectorAll('figure canvas')].map(c => c.getContext('2d')"
    ".getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 == 3 && v).length)"
)


TOPOLOGY = "getComputedStyle(document.getElementById('topology'))"
# A stage between two clocks, whatever the machine: the learner knows that of a server by its calls.
BETWEEN_CLOCKS = '#stages tr[data-stage="learner.first_use"]'


def shown_uncertainty(browser, cell):
    """How far a time between two clocks may be off, as people read it; the page says what for."""
    text = browser.text("#latency-title + .note")
    assert "± is how far a time between two clocks may be off" in text
    assert "cannot be told apart" in text
    return re.fullmatch(r"±?([\d.]+) (µs|ms|s)", browser.text(f"{BETWEEN_CLOCKS} {cell}"))


def fits(browser):
    return browser.ask("document.documentElement.scrollWidth <= innerWidth")


def test_a_run_from_its_beginning_to_its_end_and_the_next_one(tmp_path):
    address = free_address()
    options = ("--restart-window", "60", "--dashboard", address)
    overrides = settings("train.target_return=null", "train.max_env_steps=100_000_000")
    with Browser() as browser:
        with Command("train", CARTPOLE, *options, *overrides, cwd=tmp_path) as command:
            command.wait_for(rf"^dashboard at http://{address}/$")
            browser.look(**DESK)
            browser.open(f"http://{address}/")

            def shows(selector, text, timeout_s=60):
                wait_until(
                    lambda: text in browser.text(selector),
                    timeout_s,
                    f"{selector} never showed {text!r}",
                )

            # All services, live figures, a return that rises, and stages in their order.
            for role in ("env", "policy", "buffer"):
                shows(f"#node-{role}", "SERVING")
            shows("#node-learner", "running")
            shows("#stream", "live")
            assert browser.text("h1") == "RLightning cartpole/1"
            wait_until(
                lambda: browser.ask("points.length > 15 && points.at(-1)[2] > 150"),
                90,
                "the return did not rise",
            )
            assert browser.text("#banner") == ""
            assert browser.ask("document.title").startswith("cartpole/1 ")
            assert "steps/s" in browser.text("#charts figure:nth-child(1)")
            assert min(browser.ask(DRAWN)) > 500
            stages = [line.split()[0] for line in browser.text("#stages").splitlines()]
            assert stages[:3] == ["env.encode", "env.uplink", "env.queue"]
            assert {"env.round_trip", "buffer.store", "learner.update"} <= set(stages)
            assert shown_uncertainty(browser, "td.wide:nth-of-type(5)")
            assert browser.text(f"{BETWEEN_CLOCKS} small") == ""
            assert browser.complaints() == []
            browser.save(PICTURES / "dashboard.png")

            # On a phone, in the dark.
            browser.look(**PHONE, scheme="dark")
            wait_until(lambda: fits(browser), 10, "it is wider than the phone")
            wait_until(lambda: min(browser.ask(DRAWN)) > 300, 10, "a chart is empty")
            assert shown_uncertainty(browser, "small")
            assert browser.text(f"{BETWEEN_CLOCKS} td.wide:nth-of-type(5)") == ""
            browser.save(PICTURES / "dashboard-phone.png")
            browser.look(**DESK)

            # By keyboard alone.
            browser.ask("document.querySelector('#ranges button').focus()")
            browser.press("TAB", "ENTER")
            assert browser.ask("range") == 0
            assert browser.ask("document.activeElement.getAttribute('aria-pressed')") == "true"

            # A service dies, is told at once, and comes back.
            os.kill(command.services()["policy_server"], signal.SIGKILL)
            shows("#node-policy", "down for")
            assert "The policy server at 127.0.0.1:" in browser.text("#banner")
            assert browser.ask("document.title").startswith("(!) cartpole/1 ")
            again = command.wait_for(r"^  (\S.* -m rlightning\.services\.policy_server .*)$")[1]
            with subprocess.Popen(
                shlex.split(again), cwd=tmp_path, stderr=subprocess.DEVNULL
            ) as by_hand:
                try:
                    shows("#node-policy", "SERVING")
                    wait_until(lambda: browser.text("#banner") == "", 30)
                    wait_until(
                        lambda: "0 rows/s" not in browser.text("#link-act"), 30, "nobody acts again"
                    )
                    assert browser.complaints() == []
                    command.process.terminate()
                    command.wait(60)
                finally:
                    by_hand.kill()

        # The run ends, and another one begins under the same address.
        shows("#banner", "This was stopped. The dashboard does not answer. This is the state of")
        assert browser.text("#stream") == "no connection"
        # Nothing there looks as if it were well now.
        assert browser.ask(f"{TOPOLOGY}.filter") == "grayscale(1)"
        assert min(browser.ask(DRAWN)) > 500
        with Dashboard(address, run=tmp_path, name="other/1", report=str) as dashboard:
            dashboard.watch([])
            shows("h1", "other/1")
            assert browser.text("#stream") == "live"
            assert browser.text("#banner") == ""
            assert browser.ask("points.length") < 10
            assert browser.ask(f"{TOPOLOGY}.filter") == "none"
            for role in ("env", "policy", "buffer", "learner"):
                assert "none is known" in browser.text(f"#node-{role}")
            assert browser.text("#stages") == "Nothing was measured in the last minute."
    for picture in ("dashboard.png", "dashboard-phone.png"):
        assert 10_000 < (PICTURES / picture).stat().st_size < 200_000
