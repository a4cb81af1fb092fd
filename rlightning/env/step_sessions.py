"""The server's side of drivers: programs that reset and step envs themselves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlightning.env.control import Quorum
from rlightning.errors import (
    AlreadyExistsError,
    CodecError,
    EnvError,
    InvalidRequestError,
    PreconditionError,
    ResourceExhaustedError,
)
from rlightning.rpc.protocol import Arrival, stamp
from rlightning.rpc.session import Session, SessionHandler
from rlightning.rpc.status import to_error_status
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import (
    Reader,
    Writer,
    encode_value,
    fill_env_ret,
    read_policy_response,
    read_value,
)

_LOG = logging.getLogger(__name__)

# Commands whose answers are kept, at most: more than any driver has envs.
_MAX_KEPT = 4096
# What they take in memory, at most, unless a single one takes more.
_MAX_KEPT_BYTES = 64 * 2**20


class DrivenGroup(Protocol):
    """A group of rows that a driver resets and steps."""

    env_id: str
    meta: EnvMeta

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Begins a new episode in every row."""
        ...

    async def step(self, response: PolicyResponse, *, autoreset: bool = True) -> EnvRet:
        """Executes an answer."""
        ...


class StepSessions(SessionHandler[pb.StepRequest, pb.StepResponse]):
    """Serves the sessions of `Step`.

    An env belongs to the first driver that names it, until that driver's session ends, or its lease
    has and another one wants the env. The answer to the last command of each env is kept, so that a
    command that comes again after a cut is answered and not executed. Belongs to one event loop.

    Args:
        admit: Raises `PreconditionError` while there can be no driver here.
        find: Returns the group of an env id; raises `NotFoundError`, or `PreconditionError` where
            somebody else than a driver steps it.
        quorum: Commands wait for it.
        lease_s: How long a driver whose connection is lost keeps its envs from others, in seconds.
    """

    request_type = pb.StepRequest
    response_type = pb.StepResponse

    def __init__(
        self,
        admit: Callable[[], None],
        find: Callable[[str], DrivenGroup],
        quorum: Quorum,
        lease_s: float,
    ) -> None:
        self._admit = admit
        self._find = find
        self._quorum = quorum
        self._lease_s = lease_s
        self._holders: dict[str, _Driver] = {}

    @property
    def drivers(self) -> dict[str, str]:
        """The client id of its driver by env id, for those that have one."""
        return {env_id: driver.session.client_id for env_id, driver in self._holders.items()}

    async def on_open(self, session: Session, reader: Reader[pb.StepRequest]) -> pb.StepResponse:
        """Lets a driver in; one that comes back repeats what it has no answer to."""
        if not isinstance(session.state, _Driver):
            self._admit()
            session.state = _Driver(session)
        return pb.StepResponse()

    async def on_message(self, session: Session, reader: Reader[pb.StepRequest]) -> None:
        """Takes a command; it is executed in a task of its own."""
        if reader.message.WhichOneof("body") != "command":
            raise InvalidRequestError("expected a command")
        driver: _Driver = session.state
        seq = reader.message.command.seq
        if seq < 1:
            raise InvalidRequestError(f"seq: {seq} is below 1")
        if seq <= driver.seq:
            kept = driver.kept.get(seq)
            if kept is not None:  # else its answer has been received
                kept.arrival = session.arrival
                if kept.done:
                    await self._answer(driver, kept)
            return
        command = _Command.read(reader, session.arrival)
        driver.seq = seq
        driver.keep(command)
        command.task = asyncio.create_task(self._execute(driver, command))

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        """Frees the envs of a driver that has left or did not come back."""
        if not resumable and isinstance(session.state, _Driver):
            await self._release(session.state)

    async def drain(self) -> None:
        """Returns when what is being executed is done."""
        tasks = [task for driver in set(self._holders.values()) for task in driver.tasks()]
        if tasks:
            await asyncio.wait(tasks)

    def forget(self, group: DrivenGroup) -> None:
        """Takes note that a group is there no longer."""
        holder = self._holders.get(group.env_id)
        if holder is not None and holder.began.get(group.env_id) in (None, group):
            del self._holders[group.env_id]
            holder.began.pop(group.env_id, None)

    async def _execute(self, driver: _Driver, command: _Command) -> None:
        mine: set[str] = set()
        try:
            await self._quorum.wait()
            works = self._admitted(driver, command)
            mine = set(command.env_ids)
            driver.busy |= mine
            if len(works) == 1:
                command.env_rets = [await works[0]]
                works = []
            results = await asyncio.gather(*works, return_exceptions=True)
            command.env_rets += [one for one in results if isinstance(one, EnvRet)]
            errors = [one for one in results if isinstance(one, BaseException)]
            if errors:
                raise errors[0]
        except Exception as error:
            command.error = error
        finally:
            driver.busy -= mine
        command.finish()
        try:
            await self._answer(driver, command)
        except Exception as error:  # it cannot be sent as it is
            command.env_rets, command.error = [], error
            await self._answer(driver, command)

    def _admitted(self, driver: _Driver, command: _Command) -> list[Awaitable[EnvRet]]:
        """Claims the envs of a command; returns what is to be awaited for it.

        Raises:
            RLightningError: It cannot be executed; nothing has been.
        """
        groups = {env_id: self._find(env_id) for env_id in command.env_ids}
        if len(groups) != len(command.env_ids):
            raise InvalidRequestError("an env is named twice in one command")
        for env_id, group in groups.items():
            self._check_free(driver, env_id)
            if env_id in command.responses and driver.began.get(env_id) is not group:
                raise PreconditionError(
                    f"env {env_id!r}: reset it before the first step", reason="RESET_NEEDED"
                )
        works: list[Awaitable[EnvRet]] = []
        for env_id, group in groups.items():
            self._holders[env_id] = driver
            if env_id in command.resets:
                driver.began[env_id] = group
                works.append(group.reset(seed=command.seed, options=command.options))
            elif env_id in command.responses:
                answer = command.responses[env_id]
                works.append(group.step(answer, autoreset=command.autoreset))
        return works

    def _check_free(self, driver: _Driver, env_id: str) -> None:
        holder = self._holders.get(env_id)
        if holder is driver and env_id in driver.busy:
            raise PreconditionError(f"env {env_id!r} still executes a command", reason="BUSY")
        if holder is None or holder is driver:
            return
        left_s = holder.lease_left_s(self._lease_s)
        if left_s <= 0:
            holder.give_up()
            self._drop(holder)
            return
        raise AlreadyExistsError(
            f"env {env_id!r} is driven by client {holder.session.client_id}"
            + ("" if holder.session.connected else f", whose lease ends in {left_s:.1f} s")
        )

    async def _release(self, driver: _Driver) -> None:
        tasks = driver.give_up()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._drop(driver)

    def _drop(self, driver: _Driver) -> None:
        self._holders = {
            env_id: holder for env_id, holder in self._holders.items() if holder is not driver
        }
        driver.began.clear()

    async def _answer(self, driver: _Driver, command: _Command) -> None:
        # Lost if the driver is away: it repeats the command when it comes back.
        await driver.session.send(_encoded(command))


class _Driver:
    """What the server keeps of one session.

    Attributes:
        session: The session.
        seq: Number of the last command.
        kept: By number, commands whose answer may not have been received.
        began: The groups that it has reset, by env id.
        busy: Ids of the envs that execute a command.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seq = 0
        self.kept: dict[int, _Command] = {}
        self.began: dict[str, DrivenGroup] = {}
        self.busy: set[str] = set()

    def keep(self, command: _Command) -> None:
        """Keeps a command, and drops those of the same envs, whose answers must be there."""
        named = set(command.env_ids)
        for seq, old in tuple(self.kept.items()):
            if old.done and (not named.isdisjoint(old.env_ids) or not (named or old.env_ids)):
                del self.kept[seq]
        if len(self.kept) >= _MAX_KEPT:
            raise ResourceExhaustedError(f"{_MAX_KEPT} commands wait for their execution")
        nbytes = sum(old.nbytes for old in self.kept.values())
        if self.kept and nbytes + command.nbytes > _MAX_KEPT_BYTES:
            raise ResourceExhaustedError(
                f"commands of {nbytes} bytes are kept; {_MAX_KEPT_BYTES} are allowed"
            )
        self.kept[command.seq] = command

    def tasks(self) -> list[asyncio.Task[None]]:
        """Returns those of the commands that are being executed."""
        tasks = [command.task for command in self.kept.values() if not command.done]
        return [task for task in tasks if task is not None]

    def give_up(self) -> list[asyncio.Task[None]]:
        """Cancels what is being executed; a step that runs in a thread ends all the same.

        Who comes back to hear what came of it is told.
        """
        tasks = self.tasks()
        for task in tasks:
            task.cancel()
        for command in self.kept.values():
            if not command.done:
                command.error = PreconditionError(
                    "the lease has ended, and another client has taken over an env: reset those "
                    "that are left",
                    reason="STATE_LOST",
                )
                command.finish()
        return tasks

    def lease_left_s(self, lease_s: float) -> float:
        """Returns for how long it keeps its envs from others, in seconds."""
        session = self.session
        if session.connected:
            return lease_s
        return lease_s - (time.monotonic_ns() - session.heard_ns) / 1e9


@dataclass
class _Command:
    """A command, and what came of it.

    Attributes:
        seq: Its number.
        env_ids: Every env that it names.
        resets: Those to reset.
        responses: What to execute, by env id.
        seed: Of the resets.
        options: Of the resets.
        autoreset: Whether an env of one row resets itself.
        arrival: Stamps of the message that brought it last.
        nbytes: What is kept of it takes in memory, in bytes, without its answer.
        done: Whether it has its answer: `env_rets`, and `error` if one came.
        task: Executes it.
    """

    seq: int
    env_ids: list[str]
    resets: list[str]
    responses: dict[str, PolicyResponse]
    seed: int | None
    options: Mapping[str, Any] | None
    autoreset: bool
    arrival: Arrival
    nbytes: int
    done: bool = False
    env_rets: list[EnvRet] = field(default_factory=list)
    error: Exception | None = None
    task: asyncio.Task[None] | None = None

    @classmethod
    def read(cls, reader: Reader[pb.StepRequest], arrival: Arrival) -> _Command:
        """Reads a command.

        Raises:
            CodecError: It cannot be decoded.
            InvalidRequestError: Its options are no map.
        """
        message = reader.message.command
        options = read_value(message.options, reader) if message.HasField("options") else None
        if options is not None and not isinstance(options, Mapping):
            raise InvalidRequestError("options: expected a map")
        answers = [read_policy_response(one, reader) for one in message.responses]
        resets = list(message.reset_env_ids)
        stepped = [answer.env_id for answer in answers]
        return cls(
            seq=message.seq,
            env_ids=[*resets, *stepped, *message.claim_env_ids],
            resets=resets,
            responses={answer.env_id: answer for answer in answers},
            seed=message.seed if message.HasField("seed") else None,
            options=options,
            autoreset=message.autoreset,
            arrival=arrival,
            nbytes=reader.nbytes,
        )

    def finish(self) -> None:
        """Takes note that it has its answer, and lets go of what was to be executed."""
        self.done = True
        self.resets, self.responses, self.options = [], {}, None
        self.nbytes = sum(map(len, self.env_ids))


def _encoded(command: _Command) -> bytes:
    """Returns the answer to a command; of an info, what can be sent."""
    try:
        return _encode(command)
    except CodecError as error:
        if not error.path.startswith(("info", "final_info")):
            raise EnvError(f"what the env returned cannot be sent: {error}") from error
        _LOG.warning("left out of what an env returned: %s", error)
        for env_ret in command.env_rets:
            env_ret.info = _sendable(env_ret.info)
        return _encode(command)


def _encode(command: _Command) -> bytes:
    message, writer = pb.StepResponse(), Writer()
    message.answer.seq = command.seq
    for env_ret in command.env_rets:
        fill_env_ret(message.answer.env_rets.add(), env_ret, writer)
    if command.error is not None:
        message.answer.error.CopyFrom(to_error_status(command.error))
    stamp(message, command.arrival)
    return writer.finish(message)


def _sendable(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of an info the wire can carry."""
    kept = {}
    for key, value in info.items():
        if key == "final_info" and isinstance(value, Mapping):
            kept[key] = _sendable(value)
            continue
        try:
            encode_value({key: value})
        except CodecError:
            continue
        kept[key] = value
    return kept
