"""The env server over real sockets: its actors, what it tells, how it is steered, how it fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from grpc.aio import AioRpcError

from rlightning.buffer.remote_buffer import BufferClient, SampleClient
from rlightning.env.remote_client import EnvClient
from rlightning.errors import ConfigError, InvalidRequestError, PreconditionError, RemoteError
from rlightning.policy import PolicyClient, build_policy, policy_weights
from rlightning.policy.weights import dump_weights
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.testing import ServerProcess, assert_eventually
from rlightning.utils.config import MainConfig, PolicyConfig
from rlightning.v1 import env_service_pb2 as pb

ENVS = "tests.unit.env.envs"
NOWHERE = "127.0.0.1:1"


FRESH = {"model_cfg": {"hidden": [8]}, "device": "cpu", "initial_weights": "random"}
# Nobody learns here, so there is room for all that a test can collect.
ROOMY = {"type": "RolloutBuffer", "rollout_length": 64, "max_rollouts": 10_000}


def main_config(
    *,
    policy=NOWHERE,
    buffer=NOWHERE,
    env=(),
    services=None,
    policy_config=FRESH,
    buffer_config=ROOMY,
    **sections,
):
    cartpole = {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 4}
    return MainConfig.from_dict(
        {
            "env": {**cartpole, **dict(env)},
            "policy": dict(policy_config),
            "buffer": dict(buffer_config),
            **sections,
            "services": {
                name: {**(services or {}).get(name, {}), "address": address}
                for name, address in (("policy", policy), ("buffer", buffer))
            },
        }
    )


async def running(stack, service, rpc=None):
    server = await serve(service, rpc=rpc)
    stack.push_async_callback(server.stop, grace_s=5)
    await server.ready()
    return server


@asynccontextmanager
async def env_server(*, upstream=True, **kwargs):
    """An env server with its client and, if wanted, the servers that it needs."""
    async with AsyncExitStack() as stack:
        if upstream:
            config = main_config(**kwargs)
            for name, service in (("policy", PolicyService), ("buffer", BufferService)):
                rpc = getattr(config.services, name).rpc
                kwargs[name] = (await running(stack, service(config), rpc)).address
        service = EnvService(main_config(**kwargs))
        server = await running(stack, service)
        client = await stack.enter_async_context(EnvClient(server.address))
        yield client, service


async def test_it_is_ready_before_its_upstreams_and_describes_its_groups():
    async with env_server(upstream=False) as (client, service):
        status = await client.describe()
        assert [(meta.env_id, meta.num_envs) for meta in status.envs] == [
            ("cart-0-0", 2),
            ("cart-0-1", 2),
        ]
        assert status.envs[0].observation_space.shape == (4,)
        assert status.envs[0].action_space.n == 2
        assert (status.env_steps, status.episodes, status.episode_cursor) == (0, [], 0)
        assert status.actor_running
        assert status.stats["groups"] == 2
        assert not service.failure.done()


async def test_actors_step_and_episodes_come_once_to_each_cursor():
    async with env_server(train={"seed": 3}) as (client, _):
        seen = []
        cursor = 0

        async def enough():
            nonlocal cursor
            status = await client.describe(cursor)
            assert status.episode_cursor == cursor + len(status.episodes)
            seen.extend(status.episodes)
            cursor = status.episode_cursor
            return len(seen) >= 20

        await assert_eventually(enough, 60)
        assert len({(e.env_id, e.episode_id) for e in seen}) == len(seen)
        newest = await client.describe(max_episodes=3)
        assert len(newest.episodes) == 3
        assert newest.episodes == (await client.describe()).episodes[: newest.episode_cursor][-3:]
        assert {e.env_id for e in seen} == {"cart-0-0", "cart-0-1"}
        for episode in seen:
            assert episode.episode_return == episode.length > 0
            assert episode.reason in ("terminated", "truncated")
            assert episode.seed is not None
            assert episode.ts_end_ns > 0
        status = await client.describe(cursor)
        assert status.env_steps >= sum(e.length for e in seen)
        latency = status.stats["latency"]
        for stage in ("round_trip", "queue", "inference", "insert", "action_age", "env_step"):
            assert latency[stage]["count"] > 0
            assert latency[stage]["p99"] >= latency[stage]["p50"] >= 0
        assert status.stats["latency_window_s"] == 60
        for peer in ("policy", "buffer"):
            clock = status.stats["clocks"][peer]
            assert clock["same_clock"]
            assert (clock["offset_s"], clock["uncertainty_s"]) == (0, 0)
        # Each call is an exchange, too: both clocks are those of this process.
        estimate = client.offset.estimate()
        assert abs(estimate.offset_ns) <= estimate.uncertainty_ns < 1e9
        again = await client.describe(0)
        assert len(again.episodes) == again.episode_cursor
        with pytest.raises(InvalidRequestError, match="episode_cursor"):
            await client.describe(-1)
        with pytest.raises(InvalidRequestError, match="trace_cursor"):
            await client.describe(trace_cursor=-1)


async def test_rows_go_to_the_tables_that_name_their_env():
    tables = {
        "default": {"type": "RolloutBuffer", "envs": ["cart-0-0"]},
        "replay": {"type": "ReplayBuffer", "auto_truncate_episode": True},
    }
    async with env_server(buffer_config={**ROOMY, "tables": tables}) as (_, service):
        address = service._config.services.buffer.dial_address
        async with BufferClient(address) as asker:

            async def stored():
                status = await asker.describe()
                return all(table.size > 20 for table in status.tables.values())

            await assert_eventually(stored, 60)
            stats = (await asker.describe()).stats["tables"]
            assert stats["default"]["producers"].keys() == {"cart-0-0"}
            assert stats["replay"]["producers"].keys() == {"cart-0-0", "cart-0-1"}


async def test_an_env_that_no_table_names_ends_the_start():
    tables = {"other": {"envs": ["robot-*"]}}
    service = EnvService(main_config(buffer_config={**ROOMY, "tables": tables}))
    server = await serve(service)
    try:
        with pytest.raises(ConfigError, match="none has envs that match 'cart-0-0'"):
            await server.ready()
    finally:
        await server.stop(grace_s=1)


async def test_actors_are_paused_and_started():
    async with env_server() as (client, service):

        async def stepping():
            return (await client.describe()).env_steps > 100

        await assert_eventually(stepping, 60)
        assert await client.control("pause") is False
        status = await client.describe()
        assert not status.actor_running
        # Whatever was in flight is over: a pause is answered only then.
        assert (await client.describe()).env_steps == status.env_steps
        assert await client.control("start") is True
        with pytest.raises(PreconditionError, match="train.lockstep is false"):
            await client.collect(0, 1, timeout_s=10)
        steer = client._channel.unary_unary("/rlightning.v1.EnvService/Control")
        with pytest.raises(AioRpcError, match="actor: there is no command 77"):
            await steer(pb.ControlRequest(actor=77).SerializeToString())

        async def going_on():
            return (await client.describe()).env_steps > status.env_steps

        await assert_eventually(going_on, 60)
        assert not service.failure.done()


async def test_envs_take_commands_only_while_actors_are_paused():
    env = {"evaluate_cfg": {"max_episode_steps": 5}}
    async with env_server(env=env) as (client, service):
        with pytest.raises(PreconditionError, match="pause"):
            await client.control(env="apply_evaluate_cfg")
        await client.control("pause", env="apply_evaluate_cfg")
        cursor = (await client.describe()).episode_cursor
        await client.control("start")

        async def short():
            episodes = (await client.describe(cursor)).episodes
            ended = [e for e in episodes if e.reason != "cut"]
            return len(ended) >= 4 and all(e.length <= 5 for e in ended)

        await assert_eventually(short, 60)
        for command in ("restore_evaluate_cfg", "offload", "reload"):
            await client.control("pause", env=command)
        await client.control("start")
        assert not service.failure.done()


async def test_an_actor_that_gives_up_fails_the_service():
    async with env_server(env={"task": f"{ENVS}:AlwaysBreaking"}) as (client, service):
        await assert_eventually(service.failure.done, 60)
        error = service.failure.exception()
        assert "actor of cart-0-" in str(error)
        assert "the arm fell off" in str(error)
        status = await client.describe()
        assert status.stats["env_errors"] >= 10
        assert "the arm fell off" in next(iter(status.stats["last_errors"].values()))


async def test_an_env_that_breaks_now_and_then_goes_on():
    async with env_server(env={"task": f"{ENVS}:SometimesBreaking"}) as (client, service):

        async def broke_and_went_on():
            status = await client.describe()
            assert not service.failure.done(), service.failure.exception()
            cut = [e for e in status.episodes if e.reason == "cut"]
            return status.stats["env_errors"] >= 3 and len(cut) >= 3 and status.env_steps > 200

        await assert_eventually(broke_and_went_on, 60)


async def test_an_env_that_cannot_be_closed_keeps_no_other_one_open(caplog):
    env = {"backend": "gymnasium", "driver": "external"}
    tasks = {"stuck": f"{ENVS}:Unclosable", "free": f"{ENVS}:Counting"}
    envs = [{**env, "name": name, "task": task} for name, task in tasks.items()]
    service = EnvService(MainConfig.from_dict({"env": envs}))
    await service.start()
    seen = []
    await service._groups[1].call(seen.append)
    await service.close()
    assert "env 'stuck-0-0': close raised OSError: the arm is stuck" in caplog.messages
    assert seen[0].env is None


async def test_a_long_reset_is_told_and_ends_no_session():
    rpc = {"heartbeat_s": 0.05, "lease_s": 0.4}
    services = {name: {"rpc": rpc} for name in ("policy", "buffer")}
    env = {"task": f"{ENVS}:SlowReset", "num_envs": 1, "backend": "gymnasium"}
    seen = {"policy": [], "buffer": []}
    async with env_server(env=env, services=services) as (client, service):
        (actor,) = service._actors._hosted
        async with BufferClient(actor.buffer.address) as buffer:

            async def looked():
                for name, asked in (("policy", actor.policy), ("buffer", buffer)):
                    sessions = (await asked.describe()).stats["sessions"]
                    seen[name] += [told for told in sessions.values() if told["connected"]]
                return all(
                    any(
                        told["state"] == "resetting" and told["busy_s"] > 0.6 for told in seen[name]
                    )
                    for name in seen
                ) and any(told["state"] == "running" for told in seen["policy"])

            await assert_eventually(looked, 60)
            # Longer than the lease, but heard all the time.
            assert max(told["busy_s"] for told in seen["policy"]) > 2 * 0.3
            assert actor.policy._session.epoch == actor.buffer._session.epoch == 1
            assert (await client.describe()).stats["env_errors"] == 0


@pytest.mark.parametrize("length", [3, 8, 32])
async def test_no_row_is_older_than_the_rollouts_that_are_kept(length):
    buffer_config = {"type": "RolloutBuffer", "rollout_length": length, "max_rollouts": 2}
    policy_config = {"device": "cpu", "initial_weights": "none"}
    config = {"buffer_config": buffer_config, "policy_config": policy_config}
    async with AsyncExitStack() as stack:
        addresses = {}
        for name, service in (("policy", PolicyService), ("buffer", BufferService)):
            server = await serve(service(main_config(**config)))
            stack.push_async_callback(server.stop, grace_s=5)
            addresses[name] = server.address
        policy = await stack.enter_async_context(PolicyClient(addresses["policy"]))
        trained = build_policy(PolicyConfig(**policy_config), "train")
        service = EnvService(main_config(**config, **addresses))
        await running(stack, service)
        trained.init_train(env_meta=service._groups[0].meta)
        data = dump_weights(policy_weights(trained))
        await policy.publish_weights(1, data)
        samples = await stack.enter_async_context(SampleClient(addresses["buffer"]))
        ages = []
        for version in range(1, 16):
            batch = await samples.next_batch(20)
            await asyncio.sleep(0.05)  # an update, in which the buffer fills
            ages.append(int((version - batch.columns["policy_version"]).max()))
            await policy.publish_weights(version + 1, data)
        assert 1 <= max(ages) <= 2


def server_process(tmp_path, text):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    command = ["-m", "rlightning.services.env_server", "--config", str(config)]
    return ServerProcess(command, tmp_path)


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("CartPol-v1", "gymnasium has no env 'CartPol-v1'; did you mean CartPole-v"),
        (f"{ENVS}:WrongShape", r"expected float32[5], got float32[2]"),
        (f"{ENVS}:Unmakeable", "no licence"),
    ],
)
def test_an_env_that_cannot_be_hosted_ends_the_process_with_one_line(tmp_path, task, line):
    text = f"""
env: {{name: x, backend: gymnasium, task: "{task}", num_envs: 2}}
services: {{policy: {{address: "{NOWHERE}"}}, buffer: {{address: "{NOWHERE}"}}}}
"""
    with server_process(tmp_path, text) as process:
        assert process.child.wait(30) == 1
        lines = process.log.strip().splitlines()
        assert line in lines[-1]
        assert "Traceback" not in process.log


def test_a_server_without_upstream_addresses_says_so(tmp_path):
    text = "env: {name: x, backend: gymnasium, task: CartPole-v1}"
    with server_process(tmp_path, text) as process:
        assert process.child.wait(30) == 1
        assert "services.policy: no address to dial" in process.log


async def test_a_server_that_is_not_there_is_a_typed_error():
    async with EnvClient(NOWHERE) as client:
        with pytest.raises(RemoteError, match=NOWHERE):
            await client.describe(timeout_s=2)


def test_the_process_imports_neither_torch_nor_tensordict():
    code = (
        "import sys, rlightning.services.env_server.servicer; "
        "print({'torch', 'tensordict', 'torchrl'} & set(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "set()"
