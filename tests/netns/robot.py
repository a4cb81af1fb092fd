"""A robot on another machine, behind a link that is cut, in a cluster whose servers are restarted.

`python -m tests.netns.robot` does it at full size and prints a section for benchmarks/RESULTS.md; the tests do a part of it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import machine
from rlightning.buffer.remote_buffer import BufferClient
from rlightning.env.remote_client import EnvClient
from rlightning.testing import ServerProcess, free_address, wait_until
from rlightning.types import ActionSource
from tests.netns.link import Link
from tests.netns.robot_env import CAMERAS, SAMPLED, pictures_of, text_of

PATIENCE_S = 120.0
# How much the sampled pixels of a JPEG may be off, on average.
LOSSY = 12.0
# Transitions that are read at a time.
_PAGE = 500


class Robot:
    """The robot's process, in the namespace beyond a link."""

    def __init__(self, prefix: Sequence[str], address: str, options: dict[str, Any]) -> None:
        host, _, port = address.rpartition(":")
        command = ["-m", "tests.netns.robot_env", host, port, json.dumps(options)]
        self._process = subprocess.Popen(
            [*prefix, sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, line: str) -> dict[str, Any]:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise AssertionError(f"the robot ended with {self._process.wait()}")
        told: dict[str, Any] = json.loads(answer)
        return told

    def status(self) -> dict[str, Any]:
        return self._ask("status")

    def stop(self) -> dict[str, Any]:
        """Ends it; returns what it did."""
        told = self._ask("stop")
        assert self._process.wait(30) == 0
        return told

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@dataclass
class Scene:
    """A cluster on this machine and a robot beyond a link.

    Attributes:
        link: The link.
        servers: The processes by name: buffer, policy, env.
        robot: The robot.
        healed: What was done to them, with the monotonic time in ns when it was over.
    """

    link: Link
    servers: dict[str, ServerProcess]
    addresses: dict[str, str]
    robot: Robot
    healed: list[tuple[str, int]] = field(default_factory=list)

    def ticks(self) -> int:
        """Ticks of the control loop so far, also those at which a new episode waits for an answer."""
        status = self.robot.status()
        return int(status["steps"] + status["control"]["waited"])

    def go_on(self, seconds: float) -> None:
        """Lets the robot go on, whose clock has to tick meanwhile."""
        before = self.ticks()
        time.sleep(seconds)
        assert self.ticks() > before, self.robot.status()

    def cut(self, seconds: float) -> None:
        """Takes the link down for a while."""
        self.link.down()
        self.go_on(seconds)
        self.link.up()
        self._over(f"cut of {seconds:g} s")

    def restart(self, name: str) -> None:
        """Stops a server in order, and starts it again."""
        server = self.servers[name]
        server.terminate()
        assert server.wait(30) == 0, server.log
        server.start().address(PATIENCE_S)
        self._over(f"restart of the {name} server")

    def settle(self) -> None:
        """Waits until the server has all that the robot did, but for what is under way."""

        def caught_up() -> bool:
            control = self.robot.status()["control"]
            return bool(control["connected"] and control["spooled"] < 8)

        wait_until(caught_up, PATIENCE_S, f"not caught up: {self.robot.status()}")

    def _over(self, what: str) -> None:
        self.healed.append((what, time.monotonic_ns()))


@contextmanager
def scene(folder: Path, *, hz: float, chunk: int = 0, rate: str = "", cameras: str = ""):
    """Starts the cluster, the link and the robot; yields when it steps.

    Args:
        folder: For configs and logs.
        hz: Steps a second.
        chunk: Actions of an answer; 0: one that is no chunk.
        rate: What the link carries, as `tc` has it; empty: all.
        cameras: How pictures are sent; empty: as they are.
    """
    with ExitStack() as stack:
        link = stack.enter_context(Link())
        if rate:
            link.shape(rate)
        addresses = {name: free_address() for name in ("policy", "buffer")}
        addresses["env"] = free_address(link.near)
        config = {
            "env": [],
            "services": {
                "env": {"min_clients": 1, "rpc": {"reconnect_max_ms": 250}},
                **{name: {"address": addresses[name]} for name in ("policy", "buffer")},
            },
            "policy": {
                "type": "tests.netns.robot_policy:Answers",
                "device": "cpu",
                "initial_weights": "random",
                "model_cfg": {"chunk": chunk},
            },
            "buffer": {
                "type": "ReplayBuffer",
                "capacity": 20_000,
                "auto_truncate_episode": True,
                "functions": {"obs_preprocessor": "tests.netns.robot_policy:sampled"},
            },
        }
        servers = {}
        for name, address in addresses.items():
            place = folder / name
            place.mkdir(parents=True)
            file = place / "config.yaml"
            file.write_text(json.dumps(config))
            command = ["-m", f"rlightning.services.{name}_server", "--config", str(file)]
            command += ["--listen", address, "--insecure"]
            servers[name] = stack.enter_context(ServerProcess(command, place))
        for server in servers.values():
            server.address(PATIENCE_S)
        options: dict[str, Any] = {"control_hz": hz, "connect_timeout_s": PATIENCE_S}
        if cameras:
            options["cameras"] = dict.fromkeys(CAMERAS, cameras)
        robot = Robot(link.prefix, addresses["env"], options)
        stack.callback(robot.close)
        wait_until(lambda: robot.status()["steps"] > 2 * hz, PATIENCE_S, "the robot does not step")
        yield Scene(link, servers, addresses, robot)


@dataclass
class Outcome:
    """What a robot did, and what became of it.

    Attributes:
        lasted_s: From its first step to its last one, in seconds.
        steps: Steps that it executed.
        stored: Transitions in the buffer.
        lost: Steps that are not there.
        control: `ControlStatus` of the robot in the end.
        told_dropped: Steps that the env server was told were dropped.
        sources: How many of the stored steps were of which source.
        late: Actions that were executed in a step that they were not for.
        periods: From one step to the next within an episode, in seconds.
        healed: What was done, and after how many seconds an action that answers an observation of
            after that was executed.
        reconnects: Times that the robot connected again.
    """

    lasted_s: float
    steps: int
    stored: int
    lost: int
    control: dict[str, Any]
    told_dropped: int
    sources: dict[str, int]
    late: int
    periods: np.ndarray
    healed: list[tuple[str, float]]
    reconnects: int


def finish(scene: Scene, *, lossy: bool) -> Outcome:
    """Stops the robot, and compares what it did with what the buffer has.

    Raises:
        AssertionError: Something was stored twice, invented, or other than it was.
    """
    scene.settle()
    told = scene.robot.stop()
    columns, dropped = asyncio.run(_stored(scene))
    return compare(told, columns, dropped, scene.healed, lossy=lossy)


async def _stored(scene: Scene) -> tuple[Any, int]:
    async with EnvClient(scene.addresses["env"]) as client:
        deadline = time.monotonic() + PATIENCE_S
        # The actor of a client that has left stores what came of it.
        while (status := await client.describe()).envs:
            assert time.monotonic() < deadline, "the env of the robot is still there"
            await asyncio.sleep(0.1)
    async with BufferClient(scene.addresses["buffer"]) as client:
        before = -1
        while before != (size := (await client.describe()).tables["default"].size):
            before = size
            await asyncio.sleep(1.0)
        pages = [page async for page in client.pages(_PAGE)]
        return _joined(pages), int(status.stats["steps_dropped"])


def _joined(pages: Sequence[Any]) -> Any:
    """Returns the columns of several pages as one."""
    if isinstance(pages[0], dict):
        return {name: _joined([page[name] for page in pages]) for name in pages[0]}
    if isinstance(pages[0], np.ndarray):
        return np.concatenate(pages)
    return [value for page in pages for value in page]


def compare(
    told: dict[str, Any],
    columns: Any,
    told_dropped: int,
    healed: Sequence[tuple[str, int]],
    *,
    lossy: bool,
) -> Outcome:
    """Compares what a robot did with the transitions that were stored; see `finish`."""
    executed = {(episode, step): (ns, action) for ns, episode, step, *action in told["executed"]}
    order = list(executed)
    assert len(order) == len(told["executed"]), "the robot did a step twice"
    seen_ns = {(episode, step): ns for ns, episode, step in told["seen"]}
    previous = dict(zip(order[1:], order, strict=False))
    late, fresh = 0, []
    for key, (ns, action) in executed.items():
        answered = (action[0], action[1])
        if key == (action[0], action[1] + action[2]):
            fresh.append((ns, seen_ns[answered]))
        elif previous.get(key, (None,))[0] != key[0] or executed[previous[key]][1] != action:
            late += 1

    state, after = columns["observation"]["state"], columns["next_observation"]["state"]
    keys = [tuple(one) for one in state.tolist()]
    assert len(set(keys)) == len(keys), "a step was stored twice"
    assert set(keys) <= executed.keys(), "a step was invented"
    sources = columns["action_source"].reshape(-1)
    for row, key in enumerate(keys):
        action = executed[key][1]
        assert columns["action"][row].tolist() == action, (key, "another action was executed")
        assert tuple(after[row].tolist()) == (key[0], key[1] + 1), "episodes are mixed"
        own = key == (action[0], action[1] + action[2])
        if sources[row] == ActionSource.POLICY:
            assert own, (key, action)
        else:
            assert sources[row] == ActionSource.HOLD
            assert executed[previous[key]][1] == action, (key, "the last action was not held")
        assert columns["observation"]["instruction"][row] == text_of(key[0])
        for name, picture in pictures_of(key[1]).items():
            off = np.abs(columns["observation"][name][row].astype(int) - picture[SAMPLED])
            assert off.mean() < LOSSY if lossy else not off.any(), (key, name, off.mean())

    numbers = np.array([(ns, *key) for key, (ns, _) in executed.items()])
    same = numbers[1:, 1] == numbers[:-1, 1]
    delays = []
    for what, healed_ns in healed:
        first = next((ns for ns, ns_seen in fresh if ns_seen > healed_ns), None)
        assert first is not None, f"no fresh action after the {what}"
        delays.append((what, (first - healed_ns) / 1e9))
    return Outcome(
        lasted_s=float(numbers[-1, 0] - numbers[0, 0]) / 1e9,
        steps=len(executed),
        stored=len(keys),
        lost=len(executed) - len(keys),
        control=told["status"]["control"],
        told_dropped=told_dropped,
        sources={one.name: int((sources == one).sum()) for one in ActionSource},
        late=late,
        periods=np.diff(numbers[:, 0])[same] / 1e9,
        healed=delays,
        reconnects=told["status"]["reconnects"],
    )


def check(outcome: Outcome) -> None:
    """Asserts what holds however slow the machine is."""
    control = outcome.control
    assert outcome.late == 0, f"{outcome.late} actions were executed late"
    counted = control["dropped"] + control["uncertain"]
    assert outcome.lost == counted, f"{outcome.lost} steps are missing, {counted} were counted"
    assert outcome.told_dropped == control["dropped"]
    if not outcome.lost:
        assert outcome.sources["HOLD"] == control["held"]


def restarts(folder: Path, *, between_s: float, cut_s: float) -> Outcome:
    """10 Hz, pictures as they are: a cut of the link, a restart of the policy server, one of the env server."""
    with scene(folder, hz=10) as robot:
        robot.go_on(between_s)
        robot.cut(cut_s)
        robot.settle()
        robot.go_on(between_s)
        robot.restart("policy")
        robot.settle()
        robot.go_on(between_s)
        robot.restart("env")
        robot.settle()
        robot.go_on(between_s)
        return finish(robot, lossy=False)


def narrow(folder: Path, *, between_s: float, cuts_s: Sequence[float]) -> Outcome:
    """15 Hz, JPEG and chunks of 30 actions over 20 Mbit/s, with cuts."""
    options = {"hz": 15, "chunk": 30, "rate": "20mbit", "cameras": "jpeg:80"}
    with scene(folder, **options) as robot:
        robot.go_on(between_s)
        for seconds in cuts_s:
            robot.cut(seconds)
            robot.go_on(between_s)
        return finish(robot, lossy=True)


def main() -> int:
    """Runs both for five minutes each; returns 1 if a bound is missed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        first = restarts(Path(folder) / "first", between_s=75, cut_s=5)
        check(first)
        second = narrow(Path(folder) / "second", between_s=50, cuts_s=(0.3, 1, 2, 3.5, 5))
        check(second)
    print(f"\n## {datetime.now(timezone.utc).date()}, robot: `make prove-robot`\n\n{machine()}.\n")
    print("| | 10 Hz, raw | 15 Hz, JPEG, 20 Mbit/s |\n|---|---|---|")
    for name, values in _rows(first, second):
        print(f"| {name} | {values[0]} | {values[1]} |")
    print("\n| after | fresh action, s | |\n|---|---|---|")
    for outcome, rate in ((first, "10 Hz"), (second, "15 Hz")):
        for what, delay in outcome.healed:
            print(f"| {what} | {delay:.2f} | {rate} |")
    print("\n| bound | reached | asked | |\n|---|---|---|---|")
    reached = bounds(first, second)
    for bound in reached:
        note = "" if bound.met else "missed"
        print(f"| {bound.name} | {bound.value:.3g} | {bound.asked} | {note} |")
    return 0 if all(bound.met for bound in reached) else 1


class Bound(NamedTuple):
    """What was reached, and the least or the most that is asked."""

    name: str
    value: float
    limit: float
    least: bool = False

    @property
    def asked(self) -> str:
        return f"{'>=' if self.least else '<='} {self.limit:g}"

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit


def bounds(first: Outcome, second: Outcome) -> list[Bound]:
    """Returns what is asked of the run at 10 Hz and the one at 15 Hz."""
    ratio = float(np.quantile(second.periods, 0.99)) * 15
    slowest = max(delay for _, delay in second.healed)
    return [
        Bound("from the first step to the last, 10 Hz, s", first.lasted_s, 300, least=True),
        Bound("from the first step to the last, 15 Hz, s", second.lasted_s, 300, least=True),
        Bound("control period p99 / nominal, 15 Hz", ratio, 1.1),
        Bound("fresh action after the link returns, s", slowest, 2.0),
        Bound("lost or invented transitions, 15 Hz", second.lost, 0),
    ]


def _rows(*outcomes: Outcome):
    """Yields what is told of each outcome, by name."""
    for name, tell in (
        ("from the first step to the last, s", lambda o: f"{o.lasted_s:.0f}"),
        ("steps executed", lambda o: o.steps),
        ("transitions stored, each once, with the action that was executed", lambda o: o.stored),
        ("lost / counted as dropped or on their way", _lost),
        ("actions executed in a step that they were not for", lambda o: o.late),
        ("steps of the policy / held", lambda o: f"{o.sources['POLICY']} / {o.sources['HOLD']}"),
        ("ticks missed / waited at the beginning of an episode", _ticks),
        ("control period p50 / p99 / max, ms", _periods),
        ("action age p50 / p99 in the end, ms", _ages),
        ("reconnects", lambda o: o.reconnects),
    ):
        yield name, [tell(outcome) for outcome in outcomes]


def _lost(outcome: Outcome) -> str:
    return f"{outcome.lost} / {outcome.control['dropped'] + outcome.control['uncertain']}"


def _ticks(outcome: Outcome) -> str:
    return f"{outcome.control['missed']} / {outcome.control['waited']}"


def _periods(outcome: Outcome) -> str:
    quantiles = np.quantile(outcome.periods, (0.5, 0.99, 1.0)) * 1e3
    return " / ".join(f"{value:.1f}" for value in quantiles)


def _ages(outcome: Outcome) -> str:
    return f"{outcome.control['age_p50_ms']:.0f} / {outcome.control['age_p99_ms']:.0f}"


if __name__ == "__main__":
    sys.exit(main())
