"""An AgileX Piper arm over CAN; needs the extra `piper`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.env.base_env import BaseEnv
from rlightning.env.utils.actions import ActionFitter
from rlightning.env.utils.extras import load_extra
from rlightning.env.utils.options import adapter_options
from rlightning.errors import ConfigError, EnvError, ResetNeededError
from rlightning.types import ActionSource, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS

_JOINTS = ("j1", "j2", "j3", "j4", "j5", "j6")
# Millidegrees in a radian, micrometres in a metre.
_SCALE = np.array([180_000 / math.pi] * 6 + [1_000_000])
_CAN_CONTROL, _MOVE_JOINTS = 0x01, 0x01
_GRIPPER_EFFORT, _GRIPPER_ENABLE = 1000, 0x01  # 1 N m
_ENABLE_S = 5.0
_POLL_S = 0.005
# What counts as arrived: 0.05 degrees and 0.1 mm.
_NEAR = np.array([50] * 6 + [100])

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PiperOptions:
    """What `env_kwargs` may hold.

    Attributes:
        can_port: CAN channel: a network interface such as `can0`, or a serial port of `slcan`.
        bus: Interface of python-can: `socketcan`, `slcan`, `virtual`.
        enable_piper: Enable the motors and send commands; False: only look (a dry run).
        move_speed: Speed in percent of the arm's highest, 1 to 100.
        block: Wait in each step until the arm has arrived.
        enable_joint_validation: Cut targets to the joints' limits before they are sent.
        control_hz: Steps per second at most; -1: as fast as answers come.
        env_reset_joint: Six angles in radians that a reset moves to; None: it stays where it is.
        arrive_s: Seconds after which a reset or a blocking step gives up waiting.
        feedback_age_ms: Age of the last feedback beyond which the arm counts as lost.
        max_action_age_ms: Age of an observation beyond which its answer is not executed any more:
            from then on the arm holds its position.
    """

    can_port: str = "can0"
    bus: str = "socketcan"
    enable_piper: bool = False
    move_speed: int = 10
    block: bool = False
    enable_joint_validation: bool = True
    control_hz: float = -1
    env_reset_joint: list[float] | None = None
    arrive_s: float = 20.0
    feedback_age_ms: float = 200.0
    max_action_age_ms: float = 500.0

    @staticmethod
    def of(config: EnvConfig) -> PiperOptions:
        """Returns the options of a config.

        Raises:
            ConfigError: One is not known, or out of its range; the message names it.
        """
        options = PiperOptions(**adapter_options(config, _DEFAULTS, _REFUSED))
        if not 1 <= options.move_speed <= 100:
            raise ConfigError(
                f"env.env_kwargs.move_speed: expected 1 to 100, got {options.move_speed}"
            )
        for name in ("arrive_s", "feedback_age_ms", "max_action_age_ms"):
            if not getattr(options, name) > 0:
                raise ConfigError(f"env.env_kwargs.{name}: expected more than 0")
        if options.env_reset_joint is not None and len(options.env_reset_joint) != len(_JOINTS):
            raise ConfigError("env.env_kwargs.env_reset_joint: expected 6 angles in radians")
        return options


_DEFAULTS = asdict(PiperOptions())
# What the observation is and what is shown of it are not the arm's affair.
_REFUSED = {
    "intel_viewer_mapping": "the adapter has no cameras; add them in a class derived from PiperEnv",
    "visdom_config": "nothing is sent to Visdom; the page of `rlightning train` shows what is seen",
}


@ENVS.register("piper")
class PiperEnv(BaseEnv):
    """Moves a Piper arm through AgileX's own SDK, one row.

    Observation: `joints` float32 [6], angles in radians, and `gripper` float32 [1], its opening in
    metres, as the arm last reported them. Action: float32 [7], targets for the same. Options are
    those of `PiperOptions`, in `env_kwargs`. There is no reward and no end of an episode but
    `max_episode_steps`: override `outcome`.

    What keeps the arm safe is checked here, whatever a policy or the network does:

    - A target outside the joints' limits is cut to them before it is sent; `action_source` says so.
    - When no feedback has come for `feedback_age_ms`, reset and step raise, and nothing is sent.
    - When the answer to an observation has not come within `max_action_age_ms`, the arm holds the
      position that it has reached; an answer that comes later is not executed. The EnvRet then has
      the position held as `executed_action` and HOLD as `action_source`.

    `close` holds the position as well, and leaves the motors enabled: without them the arm falls.

    Args:
        config: Its section of the config; copied.
        worker_index: Number of this env among those of its group or server; None counts as 0.
        preprocess_fn: Makes the action of a response; None takes `response.action`.

    Raises:
        ConfigError: An option is wrong, or the SDK is not installed.
        EnvError: The CAN channel cannot be opened.
    """

    option_names: ClassVar[Collection[str] | None] = (*_DEFAULTS, *_REFUSED)

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        self.options = PiperOptions.of(self.config)
        self._arm = _Arm(self.options)
        low, high = (limit.astype(np.float32) for limit in self._arm.limits)
        joints = gym.spaces.Box(-np.pi, np.pi, (6,), np.float32)
        self._observation_space = gym.spaces.Dict(
            {"joints": joints, "gripper": gym.spaces.Box(-1.0, 1.0, (1,), np.float32)}
        )
        if not self.options.enable_joint_validation:
            low[:6], high[:6] = -np.pi, np.pi
        self._action_space = gym.spaces.Box(low, high, dtype=np.float32)
        self._fitter = ActionFitter(self._action_space, None, self.env_id)
        self._steps = 0
        self._is_reset = False
        self._next_step_at = 0.0

    def get_observation_space(self) -> gym.Space[Any]:
        """Returns the space of `joints` and `gripper`."""
        return self._observation_space

    def get_action_space(self) -> gym.Space[Any]:
        """Returns the targets that can be asked for."""
        return self._action_space

    def init(self) -> Any:
        """Waits for the arm and enables its motors.

        Raises:
            EnvError: The arm gives no feedback, or its motors are not enabled within 5 s.
        """
        self._arm.wait_for_feedback()
        if self.options.enable_piper:
            self._arm.enable()
        return super().init()

    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Moves to `env_reset_joint`, if there is one, and begins an episode.

        Raises:
            EnvError: The arm gives no feedback, or does not arrive within `arrive_s`.
        """
        target = self.options.env_reset_joint
        if target is not None and self.options.enable_piper:
            counts = self._arm.counts(np.array([*target, self._arm.position()[6]]))
            self._arm.move(counts)
            self._arm.wait_until_at(counts)
        self._steps, self._is_reset = 0, True
        return self._observed()

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the action of a response, if it has not come too late.

        Raises:
            ResetNeededError: There was no reset before.
            EnvError: The action is not finite, the arm gives no feedback, or it does not arrive
                within `arrive_s` in a blocking step.
        """
        if not self._is_reset:
            raise ResetNeededError(f"env {self.env_id!r}: reset it before the first step")
        fitted = self._fitter.fit(self._preprocess_fn(policy_resp))
        executed, source = fitted.executed, fitted.source
        counts = self._arm.counts(np.asarray(fitted.action, np.float64))
        if not self.options.enable_piper:
            counts = self._arm.position_counts()
        elif not self._arm.move_if_in_time(counts):
            executed, source = self._arm.hold().astype(np.float32), int(ActionSource.HOLD)
            counts = self._arm.position_counts()
        if self.options.block:
            self._arm.wait_until_at(counts)
        self._pace()
        self._steps += 1
        env_ret = self._observed()
        env_ret.last_reward, env_ret.last_terminated = self.outcome(env_ret.observation)
        env_ret.last_truncated = self._steps == self.max_episode_steps
        if source is not None:
            env_ret.executed_action, env_ret.action_source = executed, source
        return env_ret

    def outcome(self, observation: dict[str, npt.NDArray[np.float32]]) -> tuple[float, bool]:
        """Returns reward and whether the episode has terminated; to override."""
        return 0.0, False

    def close(self) -> None:
        """Holds the position and lets go of the CAN channel."""
        self._is_reset = False
        self._arm.close(hold=self.options.enable_piper)

    def _observed(self) -> EnvRet:
        position = self._arm.position().astype(np.float32)
        observation = {"joints": position[:6], "gripper": position[6:]}
        env_ret = EnvRet(self.env_id, observation, ts_observed_ns=time.time_ns())
        self._arm.await_answer(watched=self.options.enable_piper)
        return env_ret

    def _pace(self) -> None:
        if self.options.control_hz > 0:
            time.sleep(max(0.0, self._next_step_at - time.monotonic()))
            self._next_step_at = time.monotonic() + 1.0 / self.options.control_hz


class _Arm:
    """The SDK, with a thread that watches the age of feedback and of the last observation."""

    def __init__(self, options: PiperOptions) -> None:
        sdk = load_extra("piper_sdk", extra="piper", backend="piper")
        self._options = options
        self._feedback_s = options.feedback_age_ms / 1000
        self._answer_s = options.max_action_age_ms / 1000
        self._piper = sdk.C_PiperInterface_V2(
            can_name=options.can_port, judge_flag=False, can_auto_init=False
        )
        try:
            self._piper.CreateCanBus(options.can_port, bustype=options.bus, judge_flag=False)
            self._piper.ConnectPort()
        except Exception as error:
            raise EnvError(f"CAN channel '{options.can_port}': {error}") from error
        limits = [self._piper.GetSDKJointLimitParam(name) for name in _JOINTS]
        limits.append(self._piper.GetSDKGripperRangeParam())
        self.limits = np.array(limits).T
        self._low, self._high = (self._rounded(limit) for limit in self.limits)
        # Guards commands, which the SDK encodes in one message object, and what follows.
        self._lock = threading.RLock()
        self._stamp = 0.0
        self._fresh_at = -math.inf
        self._deadline = self._held_for = math.inf
        self._closed = threading.Event()
        self._watch_thread = threading.Thread(target=self._watch, name="piper-watch", daemon=True)
        self._watch_thread.start()

    def counts(self, target: npt.NDArray[np.float64]) -> Counts:
        """Returns radians and metres in the arm's units, cut to its limits if they are checked."""
        counts = self._rounded(target)
        if self._options.enable_joint_validation:
            counts = np.clip(counts, self._low, self._high)
        # A gripper is never asked for more than it opens.
        counts[6] = np.clip(counts[6], self._low[6], self._high[6])
        return counts

    def position_counts(self) -> Counts:
        """Returns where the arm is, in its units.

        Raises:
            EnvError: The last feedback is too old.
        """
        age = time.monotonic() - self._fresh_at
        if age > self._feedback_s:
            raise EnvError(
                f"no feedback from the arm on '{self._options.can_port}' for "
                f"{'ever' if math.isinf(age) else f'{age:.2f} s'}"
            )
        state = self._piper.GetArmJointMsgs().joint_state
        joints = [getattr(state, f"joint_{i}") for i in range(1, 7)]
        gripper = self._piper.GetArmGripperMsgs().gripper_state.grippers_angle
        return np.array([*joints, gripper])

    def position(self) -> npt.NDArray[np.float64]:
        """Returns where the arm is: six angles in radians, and the gripper in metres."""
        position: npt.NDArray[np.float64] = self.position_counts() / _SCALE
        return position

    def wait_for_feedback(self) -> None:
        deadline = time.monotonic() + _ENABLE_S
        while math.isinf(self._fresh_at) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.position_counts()

    def enable(self) -> None:
        deadline = time.monotonic() + _ENABLE_S
        while not self._piper.EnablePiper():
            if time.monotonic() > deadline:
                raise EnvError(f"the motors are not enabled after {_ENABLE_S:g} s")
            time.sleep(0.01)
        with self._lock:
            self._command(self.position_counts())

    def move(self, counts: Counts) -> None:
        """Sends a target.

        Raises:
            EnvError: The last feedback is too old.
        """
        self.position_counts()
        with self._lock:
            self._deadline = math.inf
            self._command(counts)

    def move_if_in_time(self, counts: Counts) -> bool:
        """Sends a target, unless the observation that it answers is too old."""
        with self._lock:
            if time.monotonic() > self._deadline:
                return False
            self.move(counts)
            return True

    def hold(self) -> npt.NDArray[np.float64]:
        """Makes the position that the arm has reached its target; returns it."""
        with self._lock:
            self._deadline = math.inf
            position = self.position()
            self._command(self.position_counts())
        return position

    def await_answer(self, *, watched: bool) -> None:
        """Begins to wait for the answer to an observation, after which the arm would hold."""
        with self._lock:
            self._deadline = time.monotonic() + self._answer_s if watched else math.inf

    def wait_until_at(self, counts: Counts) -> None:
        deadline = time.monotonic() + self._options.arrive_s
        while (distance := np.abs(self.position_counts() - counts) - _NEAR).max() > 0:
            if time.monotonic() > deadline:
                part = int(distance.argmax())
                name = "gripper" if part == 6 else f"joint {part + 1}"
                raise EnvError(f"{name} did not arrive within {self._options.arrive_s:g} s")
            time.sleep(_POLL_S)

    def close(self, *, hold: bool) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch_thread.join()
        if hold and time.monotonic() - self._fresh_at <= self._feedback_s:
            self.hold()
        self._piper.DisconnectPort()

    def _command(self, counts: Counts) -> None:
        self._piper.MotionCtrl_2(_CAN_CONTROL, _MOVE_JOINTS, self._options.move_speed, 0x00)
        joints = [int(count) for count in counts]
        self._piper.JointCtrl(*joints[:6])
        self._piper.GripperCtrl(joints[6], _GRIPPER_EFFORT, _GRIPPER_ENABLE, 0)

    def _watch(self) -> None:
        """Notes when feedback comes, by this machine's clock; holds when an answer does not."""
        while not self._closed.wait(_POLL_S):
            stamp = self._piper.GetArmJointMsgs().time_stamp
            if stamp != self._stamp:
                self._stamp, self._fresh_at = stamp, time.monotonic()
            with self._lock:
                now = time.monotonic()
                if now > self._deadline and now - self._fresh_at <= self._feedback_s:
                    # The deadline stays: what comes now has come too late.
                    self._hold_once()

    def _hold_once(self) -> None:
        if self._held_for != self._deadline:
            self._held_for = self._deadline
            self._command(self.position_counts())

    @staticmethod
    def _rounded(target: npt.NDArray[np.float64]) -> Counts:
        counts: Counts = np.rint(target * _SCALE).astype(np.int64)
        return counts
