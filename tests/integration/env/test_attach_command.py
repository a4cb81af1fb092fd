"""The command `rlightning attach`, in a process of its own."""

from __future__ import annotations

import asyncio
import signal

import pytest

from rlightning.testing import ServerProcess, assert_eventually
from tests.integration.env.attaching import (
    CART,
    CLI,
    COUNT,
    ECHO,
    PATIENCE_S,
    cluster,
    left,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("what", ["tests.integration.pairing.env:Counting", "gymnasium"])
async def test_the_command_attaches_until_ctrl_c(tmp_path, what):
    cart = what == "gymnasium"
    env, policy = (CART, {"model_cfg": {"hidden": [8]}}) if cart else (COUNT, ECHO)
    async with cluster(env, policy) as running:
        command = ["-c", CLI, "attach", what, "--server", running.env_address, "--name", "robot"]
        if cart:
            command += ["--task", "CartPole-v1", "--num-envs", "2", "--set", "env.seed=1"]
        process = ServerProcess(command, tmp_path, announces=False)
        with process:

            async def acting():
                assert process.child.poll() is None, process.log
                episodes = (await running.client.describe()).episodes
                return any(e.env_id == "attached/robot" for e in episodes)

            await assert_eventually(acting, PATIENCE_S)
            process.child.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 15) == 130
            assert "Traceback" not in process.log
            named = "gymnasium CartPole-v1" if cart else what
            assert f"attaching {named} to {running.env_address} as robot" in process.log
            assert "interrupted" in process.log
        await left(running)


async def test_ctrl_c_is_heard_while_nobody_answers(tmp_path):
    command = ["-c", CLI, "attach", "CartPole-v1", "--server", "127.0.0.1:1"]
    process = ServerProcess(command, tmp_path, announces=False)
    with process:
        await assert_eventually(lambda: "attaching" in process.log, PATIENCE_S)
        await asyncio.sleep(0.5)
        process.child.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 10) == 130


async def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    for arguments, line in [
        (["CartPol-v1", "--server", "127.0.0.1:1"], "did you mean CartPole-v"),
        (["CartPole-v1", "--server", "nowhere"], "--server: expected HOST:PORT"),
        (["ale", "--server", "127.0.0.1:1"], "--task: expected what the backend 'ale' shall make"),
        (["CartPole-v1", "--server", "127.0.0.1:1", "--name", "a/b"], "--name: expected"),
        (["CartPole-v1", "--server", "127.0.0.1:1", "--policy", "a/b"], "policy: expected a name"),
    ]:
        process = ServerProcess(["-c", CLI, "attach", *arguments], tmp_path, announces=False)
        with process:
            assert await asyncio.to_thread(process.wait, 20) == 2
            assert line in process.log.splitlines()[-1]
