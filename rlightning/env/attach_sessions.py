"""Serves the sessions of `Attach`, each of which is the group of one client."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlightning.env.attached import AttachedGroup
from rlightning.env.episodes import EpisodeLog
from rlightning.errors import ConfigError, InvalidRequestError
from rlightning.rpc.session import Session, SessionHandler
from rlightning.rpc.spec import check_spec
from rlightning.types import EnvMeta
from rlightning.utils.config import DEFAULT_POLICY, check_policy_name
from rlightning.v1 import env_service_pb2 as pb
from rlightning.v1.session_pb2 import CLIENT_STATE_RESETTING, CLIENT_STATE_RUNNING
from rlightning.wire import Reader


class AttachSessions(SessionHandler[pb.AttachRequest, pb.AttachResponse]):
    """Serves the sessions of `Attach`: one group for each client.

    Args:
        log: Takes finished episodes.
        expected: Gives what a client has to declare, by the name of its policy, which answers other
            envs, too; None where any env will do.
        attach: Takes a new group; may refuse it.
        detach: Told that the client of a group has gone for good.

    Attributes:
        groups: The groups by client id.
        env_steps: Env steps of all groups so far; every row counts.
    """

    request_type = pb.AttachRequest
    response_type = pb.AttachResponse
    max_hello_bytes = sys.maxsize  # it may bring an observation along

    def __init__(
        self,
        log: EpisodeLog,
        expected: Callable[[str], EnvMeta | None],
        attach: Callable[[AttachedGroup], None],
        detach: Callable[[AttachedGroup], None],
    ) -> None:
        self.groups: dict[str, AttachedGroup] = {}
        self.env_steps = 0
        self._log = log
        self._expected = expected
        self._attach = attach
        self._detach = detach

    async def on_open(
        self, session: Session, reader: Reader[pb.AttachRequest]
    ) -> pb.AttachResponse:
        """Makes a group of a new client, or gives one that was cut its group back."""
        if isinstance(session.state, _Attached):
            if session.state.group.failure is not None:
                raise session.state.group.failure
            resumed = session.state.group
            return pb.AttachResponse(
                taken_seq=resumed.taken_seq, decodes_cameras=resumed.decodes_cameras
            )
        hello = reader.message.hello
        policy = hello.policy or DEFAULT_POLICY
        try:
            check_policy_name(policy)
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from None
        group = AttachedGroup(session, self._log, self._count, policy, hello.cameras)
        expected = self._expected(policy)
        if expected is not None:
            check_spec(replace(expected, env_id=None, num_envs=None), group.meta)
        last_seq = reader.message.hello.last_seq
        if last_seq < 0:
            raise InvalidRequestError(f"last_seq: {last_seq} is below 0")
        group.wants_acks = reader.message.hello.wants_acks
        self._attach(group)
        session.state = _Attached(group, last_seq)
        self.groups[session.client_id] = group
        return pb.AttachResponse(decodes_cameras=group.decodes_cameras)

    async def on_message(self, session: Session, reader: Reader[pb.AttachRequest]) -> None:
        """Takes steps."""
        if reader.message.WhichOneof("body") != "steps":
            raise InvalidRequestError("expected steps")
        attached: _Attached = session.state
        if attached.group.failure is not None:
            raise attached.group.failure
        attached.group.activity.state = CLIENT_STATE_RUNNING
        left = session.when_left(reader.message)
        await attached.group.take(reader, session.arrival, attached.base, left)

    def on_state(self, session: Session) -> None:
        """Tells of a reset at the client to the servers that its group has sessions with."""
        if isinstance(session.state, _Attached):
            resets = session.client_state == CLIENT_STATE_RESETTING
            state = CLIENT_STATE_RESETTING if resets else CLIENT_STATE_RUNNING
            session.state.group.activity.state = state

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        """Ends the group of a client that has left or did not come back."""
        if resumable or not isinstance(session.state, _Attached):
            return
        group = session.state.group
        if self.groups.get(session.client_id) is group:
            del self.groups[session.client_id]
        self._detach(group)

    def _count(self, steps: int) -> None:
        self.env_steps += steps


@dataclass(frozen=True)
class _Attached:
    """What the server keeps of one session.

    Attributes:
        group: Its group.
        base: The last step that the client had sent before it came here.
    """

    group: AttachedGroup
    base: int
