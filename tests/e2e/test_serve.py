"""`rlightning serve`, and what other programs see of it."""

import json
import signal

import pytest

from rlightning.rpc.health import check_health
from tests.e2e.command import CARTPOLE, SMALL, Command, is_running, run, settings

pytestmark = pytest.mark.slow
SERVICES = ("PolicyService", "BufferService", "EnvService")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_a_signal(tmp_path, number):
    with Command("serve", CARTPOLE, *settings(*SMALL), cwd=tmp_path) as command:
        addresses = command.wait_serving()
        for address, service in zip(addresses, SERVICES, strict=True):
            for check in ("", "readiness", "liveness", f"rlightning.v1.{service}"):
                assert check_health(address, check)
        assert run("health", addresses[0], cwd=tmp_path)[:2] == (0, "SERVING\n")
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
