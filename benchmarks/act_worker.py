"""A client process of the act and loop benchmarks; jobs come as JSON lines on stdin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import uvloop

from benchmarks.echo import OPTIONS, round_trips
from benchmarks.harness import answer_jobs, cpu_s
from benchmarks.workload import SPACES, make_env
from rlightning.actor import ActorControl, ActorStats, run_actor
from rlightning.policy import PolicyClient
from rlightning.rpc.channel import Channel, connect
from rlightning.rpc.protocol import PROTOCOL_VERSION
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1.session_pb2 import CLIENT_STATE_LEAVING, Heartbeat
from rlightning.wire import Writer, fill_env_meta, fill_env_ret

Answer = dict[str, Any]

PACED = 25


class RawEnv:
    """A workload env as the actor's port; counts what it steps."""

    def __init__(self, kind: str, n: int, group: int) -> None:
        observation_space, action_space = SPACES[kind]
        self.meta = EnvMeta(f"{kind}-{n}-{group}", action_space, observation_space, n)
        self.steps = 0
        self._env = make_env(kind, n)
        self._n = n

    async def reset(self) -> EnvRet:
        zeros = np.zeros(self._n, np.float32)
        return self._env_ret(zeros, zeros.astype(bool), zeros.astype(bool))

    async def step(self, response: PolicyResponse) -> EnvRet:
        self._env.observation, reward, terminated, truncated = self._env.step(response.action)
        self.steps += self._n
        return self._env_ret(reward, terminated, truncated)

    def _env_ret(self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> EnvRet:
        return EnvRet(self.meta.env_id, self._env.observation, reward, terminated, truncated)


def policy_client(job: Answer, env: RawEnv) -> PolicyClient:
    """A client that sends what it sends through the connection, unless the job is `shared`."""
    rpc = RpcConfig() if job.get("shared") else RpcConfig(shared_memory_bytes=0)
    return PolicyClient(job["address"], spec=env.meta, rpc=rpc)


def percentiles(stamps: list[int]) -> Answer:
    """p50 and p99 in microseconds."""
    p50, p99 = np.percentile(np.asarray(stamps), [50, 99]) / 1e3
    return {"p50": p50, "p99": p99, "count": len(stamps)}


async def echo(job: Answer) -> Answer:
    """Bare round trips on K streams."""
    import grpc

    async with grpc.aio.insecure_channel(job["address"], options=OPTIONS) as channel:
        start = time.perf_counter()
        streams = [
            round_trips(channel, job["request"], job["reply"], job["seconds"])
            for _ in range(job.get("streams", 1))
        ]
        stamps = [ns for one in await asyncio.gather(*streams) for ns in one]
        return {**percentiles(stamps), "per_s": len(stamps) / (time.perf_counter() - start)}


async def act(job: Answer) -> Answer:
    """Write of the request to action decoded, one in flight; the env step outside."""
    env = RawEnv(job["kind"], job["n"], 0)
    async with policy_client(job, env) as client:
        stamps = []
        env_ret = await env.reset()
        end = time.perf_counter() + job["seconds"]
        while time.perf_counter() < end:
            start = time.perf_counter_ns()
            response = await client.act(env_ret)
            stamps.append(time.perf_counter_ns() - start)
            env_ret = await env.step(response)
        return percentiles(stamps)


async def first(job: Answer) -> Answer:
    """The first request of a session, those after it, and some at 50 a second; p50 in us."""
    env = RawEnv(job["kind"], job["n"], 0)
    async with policy_client(job, env) as client:
        env_ret = await env.reset()
        stamps = []
        for number in range(1 + job["steady"] + PACED):
            if number > job["steady"]:
                await asyncio.sleep(0.02)
            start = time.perf_counter_ns()
            response = await client.act(env_ret)
            stamps.append(time.perf_counter_ns() - start)
            env_ret = await env.step(response)
        return {
            "first": stamps[0] / 1e3,
            "steady": percentiles(stamps[1:-PACED])["p50"],
            "paced": percentiles(stamps[-PACED:])["p50"],
        }


async def loop(job: Answer) -> Answer:
    """The actor loop over K groups, without a buffer; env steps per second."""
    envs = [RawEnv(job["kind"], job["n"], group) for group in range(job["groups"])]
    clients = [policy_client(job, env) for env in envs]
    await asyncio.gather(*(client.start() for client in clients))
    controls = [ActorControl() for _ in envs]
    tasks = [
        asyncio.ensure_future(run_actor(env, client, None, control=control, stats=ActorStats()))
        for env, client, control in zip(envs, clients, controls, strict=True)
    ]
    await asyncio.sleep(0.1)
    before, start = sum(env.steps for env in envs), time.perf_counter()
    await asyncio.sleep(job["seconds"])
    steps, elapsed = sum(env.steps for env in envs) - before, time.perf_counter() - start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(client.close() for client in clients))
    return {"steps_per_s": steps / elapsed}


async def sessions(job: Answer) -> Answer:
    """Sessions of one row each, which ask again at once; answers per second."""
    envs = [RawEnv("cp", 1, group) for group in range(job["sessions"])]
    clients = [PolicyClient(job["address"], spec=env.meta) for env in envs]
    await asyncio.gather(*(client.start() for client in clients))
    end = time.perf_counter() + job["seconds"]

    async def ask(env: RawEnv, client: PolicyClient) -> int:
        answers, env_ret = 0, await env.reset()
        while time.perf_counter() < end:
            await client.act(env_ret)
            answers += 1
        return answers

    start = time.perf_counter()
    counts = await asyncio.gather(*map(ask, envs, clients))
    elapsed = time.perf_counter() - start
    await asyncio.gather(*(client.close() for client in clients))
    return {"per_s": sum(counts) / elapsed}


async def bare_sessions(job: Answer) -> Answer:
    """As `sessions`, with nothing of a client but the bytes that it sends; and CPU of the server.

    64 of `PolicyClient` in one process cost more than their server, which is to be measured.
    """
    async with policy_client(job, RawEnv("cp", 1, job["sessions"])):
        pass  # until it serves
    calls = [await _open_session(job["address"], group) for group in range(job["sessions"])]
    await asyncio.sleep(0.1)  # the server has something to do after the welcome, too
    end = time.perf_counter() + job["seconds"]

    async def ask(call: Any, request: pb.ActRequest) -> int:
        answers = 0
        while time.perf_counter() < end:
            answers += 1
            request.step.seq = answers
            await call.write(request.SerializeToString())
            data = await call.read()
        last = pb.ActResponse.FromString(data).answer
        assert last.HasField("response"), last.error
        assert last.seq == answers
        return answers

    start, begun_s = time.perf_counter(), cpu_s(job["pid"])
    counts = await asyncio.gather(*(ask(call, request) for _, call, request in calls))
    elapsed, used_s = time.perf_counter() - start, cpu_s(job["pid"]) - begun_s
    leave = pb.ActRequest(heartbeat=Heartbeat(state=CLIENT_STATE_LEAVING)).SerializeToString()
    for channel, call, _ in calls:
        await call.write(leave)
        await call.done_writing()
        await call.read()  # to the end
        await channel.close()
    return {"per_s": sum(counts) / elapsed, "cpu_us": 1e6 * used_s / sum(counts)}


async def _open_session(address: str, group: int) -> tuple[Channel, Any, pb.ActRequest]:
    """A stream with a session, and the request that it sends again and again."""
    env = RawEnv("cp", 1, group)
    hello, writer = pb.ActRequest(), Writer()
    hello.hello.session.protocol_version = PROTOCOL_VERSION
    hello.hello.session.client_id = f"bare-{group}"
    fill_env_meta(hello.hello.session.spec, env.meta, writer)
    channel = connect(address)
    call = channel.stream_stream("/rlightning.v1.PolicyService/Act")()
    await call.write(writer.finish(hello))
    welcome = pb.ActResponse.FromString(await call.read()).welcome.session
    request, writer = pb.ActRequest(), Writer()
    request.step.epoch = welcome.epoch
    fill_env_ret(request.step.env_ret, await env.reset(), writer)
    return channel, call, request


async def probe(job: Answer) -> Answer:
    """Asks for the health again and again; without `seconds`, until it is SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(job["address"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        stamps, end = [], time.perf_counter() + job.get("seconds", 120)
        while time.perf_counter() < end:
            start = time.perf_counter_ns()
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            stamps.append(time.perf_counter_ns() - start)
            if "seconds" not in job and answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
            await asyncio.sleep(0.002)
        return {**percentiles(stamps), "max_ms": max(stamps) / 1e6}


async def in_process(job: Answer) -> Answer:
    """The same env and network in one loop, nothing between them."""
    import torch

    from benchmarks.workload import forward, make_network

    torch.set_num_threads(1)
    env, network = make_env(job["kind"], job["n"]), make_network(job["kind"])
    steps, end = 0, time.perf_counter() + job["seconds"]
    stamps = []
    start = time.perf_counter()
    with torch.inference_mode():
        while time.perf_counter() < end:
            before = time.perf_counter_ns()
            action = forward(network, job["kind"], torch.from_numpy(env.observation)).numpy()
            stamps.append(time.perf_counter_ns() - before)
            env.observation = env.step(action)[0]
            steps += job["n"]
    return {**percentiles(stamps), "steps_per_s": steps / (time.perf_counter() - start)}


JOBS: dict[str, Callable[[Answer], Awaitable[Answer]]] = {
    "echo": echo,
    "act": act,
    "first": first,
    "loop": loop,
    "in_process": in_process,
    "sessions": sessions,
    "bare_sessions": bare_sessions,
    "probe": probe,
}


if __name__ == "__main__":
    uvloop.run(answer_jobs(JOBS))
