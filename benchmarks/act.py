"""Acting over the network: the real policy server against a bare echo and against one process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Ratio, Table, Worker, report, run_rounds
from benchmarks.workload import SPACES
from rlightning.cluster.process import MALLOC_ENV
from rlightning.testing import ServerProcess
from rlightning.types import EnvRet, PolicyResponse
from rlightning.wire import encode_env_ret, encode_policy_response

CELLS = (("cp", 1), ("cp", 64), ("cp", 1024), ("img", 8), ("img", 32), ("img", 128))
ACT_CEILINGS = {("cp", 1): 1.6, ("cp", 64): 1.6, ("img", 8): 1.6}
# The rows of CartPole are too small for shared memory.
SHARED_FLOORS = {("img", 8): 0.14, ("img", 32): 0.20, ("img", 128): 0.35}
LOOP_FLOORS = dict(zip(CELLS, (0.12, 0.25, 0.85, 0.09, 0.09, 0.06), strict=True))
CONFIG = (
    "policy: {type: 'benchmarks.bench_policy:BenchPolicy', torch_threads: 1, "
    "initial_weights: random}\n"
)


@contextlib.contextmanager
def policy_server() -> Iterator[Callable[[str], str]]:
    """Starts one policy server for each kind of env on demand; yields `kind -> address`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.yaml").write_text(CONFIG)
        addresses: dict[str, str] = {}

        def address(kind: str) -> str:
            if kind not in addresses:
                (folder / kind).mkdir()
                command = [
                    "-m",
                    "rlightning.services.policy_server",
                    "--config",
                    str(folder / "config.yaml"),
                ]
                server = ServerProcess(
                    [*command, "--set", "services.python_path=[.]"],
                    folder / kind,
                    environment=MALLOC_ENV,
                )
                addresses[kind] = stack.enter_context(server).address()
            return addresses[kind]

        yield address


def sizes(kind: str, n: int) -> tuple[int, int]:
    """Bytes of a request and of its answer, without the envelopes (about 100 bytes each)."""
    observation_space, action_space = SPACES[kind]
    observation = np.zeros((n, *(observation_space.shape or ())), observation_space.dtype)
    flags = np.zeros(n, bool)
    request = encode_env_ret(EnvRet("env-0-0", observation, np.zeros(n, np.float32), flags, flags))
    reply = encode_policy_response(
        PolicyResponse("env-0-0", action=np.zeros(n, action_space.dtype))
    )
    return len(request) + 100, len(reply) + 100


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the tables of acting and of the loop."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(policy_server())
        echo_server = Worker("benchmarks.echo")
        stack.callback(echo_server.close)
        client, local = Worker("benchmarks.act_worker"), Worker("benchmarks.act_worker")
        stack.callback(client.close)
        stack.callback(local.close)
        echo_address = echo_server.hello["address"]

        def echo(kind: str, n: int) -> float:
            """p50 of the bare echo of the same bytes plus p50 of a forward pass, in us."""
            request, reply = sizes(kind, n)
            trip = client.job(
                what="echo", address=echo_address, request=request, reply=reply, seconds=seconds
            )
            return float(
                trip["p50"]
                + local.job(what="in_process", kind=kind, n=n, seconds=seconds / 2)["p50"]
            )

        def act(kind: str, n: int) -> float:
            return float(
                client.job(what="act", address=address(kind), kind=kind, n=n, seconds=seconds)[
                    "p50"
                ]
            )

        cells: dict[str, Callable[[], float]] = {}
        ratios = []
        for (kind, n), ceiling in ACT_CEILINGS.items():
            name = f"{kind} N={n}"
            cells[f"echo + forward, {name}"] = lambda kind=kind, n=n: echo(kind, n)
            cells[f"act, {name}"] = lambda kind=kind, n=n: act(kind, n)
            ratios.append(
                Ratio(
                    f"act p50 / (echo + forward), {name}",
                    f"act, {name}",
                    f"echo + forward, {name}",
                    ceiling=ceiling,
                )
            )
        good = report(
            "Act round trip", run_rounds(cells, rounds=rounds, unit="us"), ratios, slack=slack
        )
        return (
            report(
                "Env, policy, env",
                _loop(client, local, address, echo_address, rounds, seconds),
                _loop_ratios(),
                slack=slack,
            )
            and good
        )


def _loop(
    client: Worker,
    local: Worker,
    address: Callable[[str], str],
    echo_address: str,
    rounds: int,
    seconds: float,
) -> Table:
    cells: dict[str, Callable[[], float]] = {}
    for kind, n in CELLS:
        name = f"{kind} N={n}"
        request, reply = sizes(kind, n)
        cells[f"in process, {name}"] = lambda kind=kind, n=n: float(
            local.job(what="in_process", kind=kind, n=n, seconds=seconds)["steps_per_s"]
        )
        cells[f"bare echo, {name}"] = lambda n=n, request=request, reply=reply: (
            n
            * float(
                client.job(
                    what="echo",
                    address=echo_address,
                    request=request,
                    reply=reply,
                    seconds=seconds,
                    streams=2,
                )["per_s"]
            )
        )
        cells[f"cluster, {name}"] = lambda kind=kind, n=n: float(
            client.job(
                what="loop", address=address(kind), kind=kind, n=n, groups=2, seconds=seconds
            )["steps_per_s"]
        )
        if (kind, n) in SHARED_FLOORS:
            cells[f"cluster, shared memory, {name}"] = lambda kind=kind, n=n: float(
                client.job(
                    what="loop",
                    address=address(kind),
                    kind=kind,
                    n=n,
                    groups=2,
                    seconds=seconds,
                    shared=True,
                )["steps_per_s"]
            )
    return run_rounds(cells, rounds=rounds, unit="env steps/s")


def _loop_ratios() -> list[Ratio]:
    ratios = []
    for (kind, n), floor in LOOP_FLOORS.items():
        name = f"{kind} N={n}"
        ratios.append(
            Ratio(
                f"TCP, 2 groups / in process, {name}",
                f"cluster, {name}",
                f"in process, {name}",
                floor=floor,
            )
        )
        ratios.append(
            Ratio(
                f"TCP, 2 groups / bare echo on 2 streams, {name}",
                f"cluster, {name}",
                f"bare echo, {name}",
            )
        )
    for (kind, n), floor in SHARED_FLOORS.items():
        name = f"{kind} N={n}"
        ratios.append(
            Ratio(
                f"shared memory, 2 groups / in process, {name}",
                f"cluster, shared memory, {name}",
                f"in process, {name}",
                floor=floor,
            )
        )
        ratios.append(
            Ratio(
                f"shared memory / TCP, 2 groups, {name}",
                f"cluster, shared memory, {name}",
                f"cluster, {name}",
            )
        )
    return ratios
