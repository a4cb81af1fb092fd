"""`rlightning serve`, and what other programs see of it."""

import json
import signal

import pytest

from rlightning.rpc.health import check_health
from rlightning.testing import wait_until
from tests.e2e.command import (
    CARTPOLE,
    LABELS,
    SMALL,
    Command,
    TerminalCommand,
    is_running,
    run,
    settings,
)
from tests.integration.test_dashboard import Page, health

pytestmark = pytest.mark.slow
SERVICES = ("PolicyService", "BufferService", "EnvService")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(tmp_path, number):
    options = ("--dashboard", "127.0.0.1:0") if number == signal.SIGINT else ()
    kind = Command if options else TerminalCommand
    with kind("serve", CARTPOLE, *options, *settings(*SMALL), cwd=tmp_path) as command:
        addresses = command.wait_serving()
        for address, service in zip(addresses, SERVICES, strict=True):
            for check in ("", "readiness", "liveness", f"rlightning.v1.{service}"):
                assert check_health(address, check)
        assert run("health", addresses[0], cwd=tmp_path)[:2] == (0, "SERVING\n")
        if options:
            page = Page(command.wait_for(r"^dashboard at (http://127.0.0.1:\d+/)$")[1])
            wanted = dict.fromkeys(("env", "policy", "buffer"), "SERVING")
            assert page.until(lambda state: health(state) == wanted)["run"] == "cartpole/1"
        else:
            for label, address in zip(LABELS, addresses, strict=True):
                command.wait_for(rf"^{label} +{address} +SERVING +[1-9]\d* s")  # kept up to date
            watch_top(addresses, tmp_path)
        pids = list(command.services().values())
        command.process.send_signal(number)
        assert command.wait(20) == 0
        assert command.stderr == ""
        assert not any(map(is_running, pids))
    assert run("health", addresses[0], cwd=tmp_path)[0] == 1
    code, out, _ = run("top", "--once", "--interval", "0.1", cwd=tmp_path)
    assert code == 1
    assert [line.split()[1:3] for line in out.splitlines()[2:5]] == [
        [address, "DOWN"] for address in addresses
    ]


def watch_top(addresses, folder):
    """Looks at `top` on a terminal until its view was kept up to date, and leaves it by Ctrl-C."""
    wanted = (*addresses, "SERVING", "steps/s")

    def views():
        """How many there were on a screen of their own, each from the upper left corner on."""
        own = top.written.partition("\x1b[?1049h")[2]
        return sum(all(word in view for word in wanted) for view in own.split("\x1b[H"))

    with TerminalCommand("top", *addresses, "--interval", "0.1", cwd=folder) as top:
        wait_until(lambda: views() >= 3, 60)
        top.interrupt()
        assert (top.wait(30), top.stderr) == (0, "")
        assert "\x1b[?1049l" in top.written  # the terminal is as before


def test_train_with_services_that_run_elsewhere(tmp_path):
    with Command("serve", CARTPOLE, *settings(*SMALL), cwd=tmp_path) as command:
        policy, buffer, env = command.wait_serving()
        addresses = settings(
            f"services.policy.address={policy}",
            f"services.buffer.address={buffer}",
            f"services.env.address={env}",
        )
        code, out, err = run(
            "train", CARTPOLE, *settings(*SMALL), *addresses, "--json", cwd=tmp_path
        )
        assert code == 0, err
        assert '"outcome": "finished"' in out
        look = ("--once", "--json", "--interval", "0.1")
        code, out, err = run("top", *look, cwd=tmp_path)  # of the last run, which is that of train
        shown = json.loads(out)
        assert (code, err) == (0, "")
        assert [one["role"] for one in shown["services"]] == ["policy", "buffer", "env"]
        assert shown["env_steps"] >= 256
        assert shown["policy_version"] > 0
        assert shown["learner"]["outcome"] == "finished"
        assert "learner.update" in shown["learner"]["latencies_s"]
        code, out, _ = run("top", env, "--once", "--interval", "0.1", cwd=tmp_path)
        assert (code, " SERVING " in out, "env.inference" in out) == (0, True, True)
        assert command.process.poll() is None
