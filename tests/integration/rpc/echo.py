"""A policy service that answers every observation with itself; knows nothing of policies."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from rlightning.errors import InvalidRequestError, NotFoundError
from rlightning.rpc.handlers import stream_unary, unary_stream, unary_unary
from rlightning.rpc.protocol import stamp
from rlightning.rpc.session import Session, SessionHandler, SessionMethod, SessionRegistry
from rlightning.rpc.spec import check_spec
from rlightning.types import EnvMeta, PolicyResponse
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.wire import Reader, Writer, fill_policy_response, read_env_ret

logger = logging.getLogger(__name__)

METHOD = "/rlightning.v1.PolicyService/Act"


class EchoHandler(SessionHandler[pb.ActRequest, pb.ActResponse]):
    request_type = pb.ActRequest
    response_type = pb.ActResponse
    shares_memory = True

    def __init__(self, expected: EnvMeta | None = None) -> None:
        self.expected = expected
        self.opened: list[Session] = []
        self.closed: list[tuple[str, bool]] = []
        self.seqs: list[int] = []
        self.gate: asyncio.Event | None = None

    async def on_open(self, session: Session, reader: Reader[pb.ActRequest]) -> pb.ActResponse:
        if self.expected is not None:
            assert session.spec is not None
            check_spec(self.expected, session.spec)
        if not session.resumed:
            session.state = deque[int](maxlen=100)
        self.opened.append(session)
        response = pb.ActResponse()
        response.welcome.policy_version = 7
        return response

    async def on_message(self, session: Session, reader: Reader[pb.ActRequest]) -> None:
        step = reader.message.step
        arrival = session.arrival
        if self.gate is not None:
            await self.gate.wait()
        self.seqs.append(step.seq)
        session.state.append(step.seq)
        env_ret = read_env_ret(step.env_ret, reader)
        writer, response = Writer(), pb.ActResponse()
        response.answer.seq = step.seq
        fill_policy_response(
            response.answer.response,
            PolicyResponse(env_ret.env_id, action=env_ret.observation),
            writer,
        )
        stamp(response, arrival)
        await session.send(writer.finish(response))

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        self.closed.append((session.client_id, resumable))
        logger.info("closed %s, resumable %s", session.client_id, resumable)


class EchoService:
    name = "rlightning.v1.PolicyService"
    scopes = {"Act": "actor", "Describe": "env learner"}

    def __init__(self, rpc: RpcConfig | None = None, expected: EnvMeta | None = None) -> None:
        self.handler = EchoHandler(expected)
        self.registry = SessionRegistry(rpc or RpcConfig(), METHOD)
        self.go = asyncio.Event()
        self.go.set()
        self.log: list[str] = []

    def handlers(self):
        return {
            "Act": SessionMethod(self.registry, self.handler),
            "Describe": unary_unary(pb.PolicyServiceDescribeRequest, self.describe),
            "PullWeights": unary_stream(pb.PullWeightsRequest, self.pull),
            "PublishWeights": stream_unary(pb.PublishWeightsRequest, self.publish),
        }

    async def describe(self, request, context):
        self.log.append("describe")
        return pb.PolicyServiceDescribeResponse(sessions=self.registry.open_count)

    async def pull(self, request, context):
        """Yields as many chunks as the request says, then waits if that is 1, or raises if it is 2."""
        for number in range(request.min_policy_version):
            yield pb.PullWeightsResponse(chunk=bytes([number]))
        if request.min_policy_version == 1:
            await asyncio.Event().wait()
        if request.min_policy_version == 2:
            raise NotFoundError("no more")

    async def publish(self, requests, context):
        """Counts the bytes; an empty chunk is refused at once."""
        size = 0
        async for request in requests:
            if not request.chunk:
                raise InvalidRequestError("an empty chunk")
            size += len(request.chunk)
        return pb.PublishWeightsResponse(policy_version=size)

    async def start(self) -> None:
        await self.go.wait()
        self.log.append("start")

    async def drain(self, deadline_s: float) -> None:
        self.log.append("drain")

    async def close(self) -> None:
        self.log.append("close")
