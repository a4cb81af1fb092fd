"""The envs of an env server as a member of an `EnvGroup`."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, ClassVar

from rlightning.env.attached import PREFIX
from rlightning.env.base_env import BaseEnv
from rlightning.env.env_source import DialledEnvs, EmbeddedEnvs, EnvSource
from rlightning.env.remote_client import EnvCommand
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.errors import EnvError
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS


@ENVS.register("env_server")
class RemoteEnvServer(BaseEnv):
    """Steps envs that are elsewhere: those of a running env server, or those that clients attach.

    With `config.address` it dials an env server and drives its envs with `driver: external`, and
    those attached there if `services.env.attached_driver` is `external`. Without, it listens at
    `config.listen` for clients (`RemoteEnvClient`, `rlightning attach`) from the moment it is made.

    Each env is known as `<env_id of this>/<name>`, the name being the id of the client, or of the
    env at the server. All their returns have the leading dimension of their rows, also of one, and
    a row begins its next episode in the step that ends one. Actions likewise.

    Args:
        config: Its section of the config; copied.
        worker_index: Number of this env among those of its group; None counts as 0.
        preprocess_fn: Takes no part: actions travel as they are.

    Raises:
        ConfigError: It may not listen at `config.listen`, or the port is taken.
    """

    option_names: ClassVar[Collection[str] | None] = ()
    vectorises = True  # the envs are elsewhere already

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        if preprocess_fn not in (None, default_env_preprocess_fn):
            warnings.warn(
                "an env server has no preprocess_fn: give it to the env at the client",
                UserWarning,
                stacklevel=2,
            )
        self._loop = shared_loop()
        self._metas: dict[str, EnvMeta] = {}
        self._wire_ids: dict[str, str] = {}
        self._stepping: dict[Future[EnvRet], None] = {}
        self._stats_lock = threading.Lock()
        self._source: EnvSource
        if config.address is not None:
            self._source, self._address = DialledEnvs(config), config.address
        else:
            embedded = EmbeddedEnvs(config)
            self._source, self._address = embedded, self._loop.run(embedded.start())

    def get_address_port(self) -> tuple[str, int]:
        """Returns host and port of the server: what was bound, or what is dialled."""
        host, _, port = self._address.rpartition(":")
        return host.strip("[]"), int(port)

    def init(self) -> EnvMeta:
        """Waits until `min_clients` envs are there.

        Returns:
            The spaces of the first of them, and the rows of all; `metas` has each.

        Raises:
            DeadlineExceededError: They did not come within `clients_timeout_s`.
            RemoteError: There is no server, or it refuses to be driven.
        """
        self._refresh()
        first = next(iter(self._metas.values()))
        rows = sum(meta.num_envs or 1 for meta in self._metas.values())
        return EnvMeta(self.env_id, first.action_space, first.observation_space, rows)

    def metas(self) -> dict[str, EnvMeta]:
        """Returns the envs that were there at the last `init` or `reset`, by id."""
        return dict(self._metas)

    def reset(self, *args: Any, **kwargs: Any) -> tuple[EnvRet, ...]:  # type: ignore[override]
        """Resets every env that is there now.

        An env that a client attached resets itself, and gives the observation at which it stands.

        Args:
            *args: None.
            **kwargs: `seed` and `options`; attached envs take none.

        Returns:
            What each returned.

        Raises:
            DeadlineExceededError: There were not `min_clients` in time.
            RemoteError: An env failed, or takes no seed and no options.
        """
        self._refresh()
        resets = [self.submit_reset(env_id, **kwargs) for env_id in self._metas]
        wait(resets)
        return tuple(one.result() for one in resets)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Steps the env that a response names, and waits for what it returns.

        Raises:
            EnvError: There is no such env, or it failed.
            RemoteError: The env failed, or its server is gone for good.
        """
        return self.submit(policy_resp.env_id, policy_resp).result()

    def step_async(self, policy_resp_list: list[PolicyResponse]) -> None:
        """Sends each response to the env that it names, and returns at once.

        Raises:
            EnvError: There is no such env.
        """
        for response in policy_resp_list:
            self._stepping[self.submit(response.env_id, response)] = None

    def collect_async(self, timeout: float | None = None) -> tuple[EnvRet, ...]:  # type: ignore[override]
        """Waits for the first env that has stepped, and returns all that have by then.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Returns:
            What they returned; nothing if the time was up, or nothing was stepped.

        Raises:
            Exception: What an env raised; the others can still be collected.
        """
        if not self._stepping:
            return ()
        deadline = None if timeout is None else time.monotonic() + timeout
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done = wait(list(self._stepping), timeout=left, return_when=FIRST_COMPLETED).done
        for failed in [one for one in done if one.exception() is not None]:
            del self._stepping[failed]
            failed.result()  # raises
        ordered = [one for one in self._stepping if one in done]
        for one in ordered:
            del self._stepping[one]
        return tuple(one.result() for one in ordered)

    def submit(self, env_id: str, response: PolicyResponse) -> Future[EnvRet]:
        """Begins a step of one env; returns a future for what it returns.

        Raises:
            EnvError: There is no such env.
        """
        response = self._before(response).copy()
        response.env_id = self._wire_id(env_id)
        return self._loop.submit(self._step_one(env_id, response))

    def submit_reset(self, env_id: str, **kwargs: Any) -> Future[EnvRet]:
        """Begins a reset of one env; returns a future for what it returns.

        Raises:
            EnvError: There is no such env.
        """
        wire_id = self._wire_id(env_id)
        return self._loop.submit(self._reset_one(env_id, wire_id, kwargs))

    def get_env_stats(self, reset: bool = False) -> dict[str, list[float]]:
        """Returns statistics of finished episodes: what came in `info["episode_info"]`."""
        with self._stats_lock:
            return super().get_env_stats(reset)

    def offload(self) -> None:
        """Lets the hosted envs of a dialled server free their device memory."""
        self._command("offload")

    def reload(self) -> None:
        """Lets the hosted envs of a dialled server take their device memory again."""
        self._command("reload")

    def apply_evaluate_cfg(self) -> None:
        """Applies the `evaluate_cfg` of the hosted envs of a dialled server; reset them then."""
        self._command("apply_evaluate_cfg")

    def restore_evaluate_cfg(self) -> None:
        """Undoes `apply_evaluate_cfg`; reset them then."""
        self._command("restore_evaluate_cfg")

    def close(self) -> None:
        """Leaves the envs; one that listens tells its clients."""
        self._loop.run(self._source.close())

    def _command(self, command: EnvCommand) -> None:
        self._loop.run(self._source.command(command))

    def _refresh(self) -> None:
        metas = self._loop.run(self._source.metas())
        self._metas, self._wire_ids = {}, {}
        for meta in metas:
            wire_id = str(meta.env_id)
            env_id = f"{self.env_id}/{wire_id.removeprefix(PREFIX)}"
            self._wire_ids[env_id] = wire_id
            self._metas[env_id] = replace(meta, env_id=env_id)

    def _wire_id(self, env_id: str) -> str:
        if env_id not in self._wire_ids:
            raise EnvError(f"no env {env_id!r}; there are {list(self._wire_ids) or 'none'}")
        return self._wire_ids[env_id]

    async def _step_one(self, env_id: str, response: PolicyResponse) -> EnvRet:
        return self._received(env_id, await self._source.step(response))

    async def _reset_one(self, env_id: str, wire_id: str, kwargs: Mapping[str, Any]) -> EnvRet:
        return self._received(env_id, await self._source.reset(wire_id, **kwargs))

    def _received(self, env_id: str, env_ret: EnvRet) -> EnvRet:
        env_ret.env_id = env_id
        episode_info = env_ret.info.get("episode_info")
        if episode_info:
            with self._stats_lock:
                self._record_episodes(episode_info)
        return env_ret
