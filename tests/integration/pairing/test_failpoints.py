"""Servers that die between two steps of what they do: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlightning.buffer.remote_buffer import BufferClient, InsertClient
from rlightning.policy import PolicyClient, WeightPublisher
from rlightning.testing import assert_eventually
from rlightning.utils.failpoints import EXIT_CODE
from tests.integration.pairing.policy import weights
from tests.integration.pairing.test_pairing import CONFIG, FAST, PATIENCE_S, learning
from tests.service_processes import Services
from tests.unit.buffer.scripted import ScriptedEnv, answer

pytestmark = [pytest.mark.crash, pytest.mark.timeout(120)]


async def die_and_come_back(services: Services, name: str) -> None:
    """Waits until a failpoint has ended a server, and starts it again without."""
    assert await asyncio.to_thread(services.processes[name].wait, PATIENCE_S) == EXIT_CODE
    services.restart(name)


async def test_a_message_that_was_stored_and_not_acked_is_stored_once(tmp_path: Path) -> None:
    services = Services(
        tmp_path, CONFIG, names=["buffer"], failpoints={"buffer": "insert.stored=exit@6"}
    )
    env = ScriptedEnv()
    with services:
        services.wait_serving()
        address = services.addresses["buffer"]
        async with (
            InsertClient(address, spec=env.meta, rpc=FAST, window_items=3) as writer,
            BufferClient(address, rpc=FAST) as asked,
        ):
            dying = asyncio.ensure_future(die_and_come_back(services, "buffer"))
            env_ret = env.reset()
            for step in range(12):
                await writer.insert(env_ret, answer(env_ret, version=step))
                env_ret = env.step()
            await dying
            await writer.flush(PATIENCE_S)
            assert (writer.acked, writer.rebased) == (12, 1)
            columns = await asked.get()
    # Message k + 1 brings step k, and completes the transition before it. Those that were acked went
    # with the server: at most the 5 before the one at which it died.
    for row in range(2):
        steps = columns["step"][columns["observation"][:, 0] == row].tolist()
        assert steps == list(range(steps[0], 11))
        assert steps[0] <= 5


@pytest.mark.parametrize("place", ["weights.kept", "weights.swapped"])
async def test_weights_that_were_not_acked_are_used_or_published_again(
    tmp_path: Path, place: str
) -> None:
    config = CONFIG.replace("device: cpu", f"device: cpu, state_dir: {tmp_path / 'state'}")
    services = Services(
        tmp_path, config, names=["policy"], failpoints={"policy": f"{place}=exit@2"}
    )
    with services:
        services.wait_serving()
        async with PolicyClient(services.addresses["policy"], rpc=FAST) as policy:
            publisher = WeightPublisher(policy, watch_s=0.1)
            publisher.start()
            await publisher.publish(1, weights(1), timeout_s=PATIENCE_S)
            publishing = asyncio.ensure_future(
                publisher.publish(2, weights(2), timeout_s=PATIENCE_S)
            )
            await die_and_come_back(services, "policy")
            # They were kept before anybody acted with them, so no session sees them go.
            assert (await policy.describe(timeout_s=PATIENCE_S)).policy_version == 2
            await publishing
            await publisher.publish(3, weights(3), timeout_s=PATIENCE_S)
            assert (await policy.pull_weights())[0] == 3
            await publisher.close()


async def test_a_policy_server_that_dies_with_new_weights_loses_no_row(tmp_path: Path) -> None:
    services = Services(tmp_path, CONFIG, failpoints={"policy": "weights.swapped=exit@6"})
    with services:
        services.wait_serving()
        async with learning(services) as (learner, progress):
            await die_and_come_back(services, "policy")
            await progress()
        assert learner.ledger.repeated == 0
        assert learner.ledger.missing() == 0


async def test_an_env_server_that_dies_with_an_outcome_doubles_no_row(tmp_path: Path) -> None:
    services = Services(tmp_path, CONFIG, failpoints={"env": "actor.stepped=exit@101"})
    with services:
        services.wait_serving()
        async with learning(services) as (learner, progress):
            await die_and_come_back(services, "env")
            await progress()
            await assert_eventually(lambda: len(learner.ledger.instances) == 2 * 6, PATIENCE_S)
        # What was not inserted is gone with its envs: at their end, not in between.
        assert learner.ledger.repeated == 0
        assert learner.ledger.missing() == 0
