from rlightning.v1 import env_ret_pb2 as _env_ret_pb2
from rlightning.v1 import policy_response_pb2 as _policy_response_pb2
from rlightning.v1 import session_pb2 as _session_pb2
from rlightning.v1 import space_pb2 as _space_pb2
from rlightning.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PictureFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PICTURE_FORMAT_UNSPECIFIED: _ClassVar[PictureFormat]
    PICTURE_FORMAT_PNG: _ClassVar[PictureFormat]
    PICTURE_FORMAT_JPEG: _ClassVar[PictureFormat]

class ActorCommand(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTOR_COMMAND_UNSPECIFIED: _ClassVar[ActorCommand]
    ACTOR_COMMAND_START: _ClassVar[ActorCommand]
    ACTOR_COMMAND_PAUSE: _ClassVar[ActorCommand]

class EnvCommand(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENV_COMMAND_UNSPECIFIED: _ClassVar[EnvCommand]
    ENV_COMMAND_OFFLOAD: _ClassVar[EnvCommand]
    ENV_COMMAND_RELOAD: _ClassVar[EnvCommand]
    ENV_COMMAND_APPLY_EVALUATE_CFG: _ClassVar[EnvCommand]
    ENV_COMMAND_RESTORE_EVALUATE_CFG: _ClassVar[EnvCommand]
PICTURE_FORMAT_UNSPECIFIED: PictureFormat
PICTURE_FORMAT_PNG: PictureFormat
PICTURE_FORMAT_JPEG: PictureFormat
ACTOR_COMMAND_UNSPECIFIED: ActorCommand
ACTOR_COMMAND_START: ActorCommand
ACTOR_COMMAND_PAUSE: ActorCommand
ENV_COMMAND_UNSPECIFIED: EnvCommand
ENV_COMMAND_OFFLOAD: EnvCommand
ENV_COMMAND_RELOAD: EnvCommand
ENV_COMMAND_APPLY_EVALUATE_CFG: EnvCommand
ENV_COMMAND_RESTORE_EVALUATE_CFG: EnvCommand

class AttachRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "steps", "timing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    heartbeat: _session_pb2.Heartbeat
    steps: AttachSteps
    timing: _session_pb2.Timing
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., steps: _Optional[_Union[AttachSteps, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("session", "last_seq", "last_env_ret", "wants_acks", "cameras", "policy")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_ENV_RET_FIELD_NUMBER: _ClassVar[int]
    WANTS_ACKS_FIELD_NUMBER: _ClassVar[int]
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Hello
    last_seq: int
    last_env_ret: _env_ret_pb2.EnvRet
    wants_acks: bool
    cameras: _containers.RepeatedCompositeFieldContainer[CameraEncoding]
    policy: str
    def __init__(self, session: _Optional[_Union[_session_pb2.Hello, _Mapping]] = ..., last_seq: _Optional[int] = ..., last_env_ret: _Optional[_Union[_env_ret_pb2.EnvRet, _Mapping]] = ..., wants_acks: _Optional[bool] = ..., cameras: _Optional[_Iterable[_Union[CameraEncoding, _Mapping]]] = ..., policy: _Optional[str] = ...) -> None: ...

class CameraEncoding(_message.Message):
    __slots__ = ("path", "format")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[str]
    format: PictureFormat
    def __init__(self, path: _Optional[_Iterable[str]] = ..., format: _Optional[_Union[PictureFormat, str]] = ...) -> None: ...

class AttachSteps(_message.Message):
    __slots__ = ("epoch", "steps")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    steps: _containers.RepeatedCompositeFieldContainer[AttachStep]
    def __init__(self, epoch: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[AttachStep, _Mapping]]] = ...) -> None: ...

class AttachStep(_message.Message):
    __slots__ = ("seq", "env_ret", "wants_action", "dropped", "response")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ENV_RET_FIELD_NUMBER: _ClassVar[int]
    WANTS_ACTION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    env_ret: _env_ret_pb2.EnvRet
    wants_action: bool
    dropped: int
    response: _policy_response_pb2.PolicyResponse
    def __init__(self, seq: _Optional[int] = ..., env_ret: _Optional[_Union[_env_ret_pb2.EnvRet, _Mapping]] = ..., wants_action: _Optional[bool] = ..., dropped: _Optional[int] = ..., response: _Optional[_Union[_policy_response_pb2.PolicyResponse, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat", "answer", "drain", "ack", "timing", "taken_seq", "decodes_cameras")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TAKEN_SEQ_FIELD_NUMBER: _ClassVar[int]
    DECODES_CAMERAS_FIELD_NUMBER: _ClassVar[int]
    welcome: _session_pb2.Welcome
    heartbeat: _session_pb2.Heartbeat
    answer: AttachAnswer
    drain: _session_pb2.Drain
    ack: AttachAck
    timing: _session_pb2.Timing
    taken_seq: int
    decodes_cameras: bool
    def __init__(self, welcome: _Optional[_Union[_session_pb2.Welcome, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., answer: _Optional[_Union[AttachAnswer, _Mapping]] = ..., drain: _Optional[_Union[_session_pb2.Drain, _Mapping]] = ..., ack: _Optional[_Union[AttachAck, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ..., taken_seq: _Optional[int] = ..., decodes_cameras: _Optional[bool] = ...) -> None: ...

class AttachAck(_message.Message):
    __slots__ = ("taken_seq", "closing")
    TAKEN_SEQ_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    taken_seq: int
    closing: bool
    def __init__(self, taken_seq: _Optional[int] = ..., closing: _Optional[bool] = ...) -> None: ...

class AttachAnswer(_message.Message):
    __slots__ = ("seq", "response", "error", "stages")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    seq: int
    response: _policy_response_pb2.PolicyResponse
    error: _session_pb2.ErrorStatus
    stages: _session_pb2.Stages
    def __init__(self, seq: _Optional[int] = ..., response: _Optional[_Union[_policy_response_pb2.PolicyResponse, _Mapping]] = ..., error: _Optional[_Union[_session_pb2.ErrorStatus, _Mapping]] = ..., stages: _Optional[_Union[_session_pb2.Stages, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "command", "timing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    hello: _session_pb2.Hello
    heartbeat: _session_pb2.Heartbeat
    command: StepCommand
    timing: _session_pb2.Timing
    def __init__(self, hello: _Optional[_Union[_session_pb2.Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., command: _Optional[_Union[StepCommand, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class StepCommand(_message.Message):
    __slots__ = ("seq", "epoch", "reset_env_ids", "seed", "responses", "options", "autoreset", "claim_env_ids")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESET_ENV_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    AUTORESET_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ENV_IDS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: int
    reset_env_ids: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    responses: _containers.RepeatedCompositeFieldContainer[_policy_response_pb2.PolicyResponse]
    options: _tensor_pb2.Value
    autoreset: bool
    claim_env_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[int] = ..., reset_env_ids: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., responses: _Optional[_Iterable[_Union[_policy_response_pb2.PolicyResponse, _Mapping]]] = ..., options: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., autoreset: _Optional[bool] = ..., claim_env_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat", "answer", "drain", "timing")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    welcome: _session_pb2.Welcome
    heartbeat: _session_pb2.Heartbeat
    answer: StepAnswer
    drain: _session_pb2.Drain
    timing: _session_pb2.Timing
    def __init__(self, welcome: _Optional[_Union[_session_pb2.Welcome, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., answer: _Optional[_Union[StepAnswer, _Mapping]] = ..., drain: _Optional[_Union[_session_pb2.Drain, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class StepAnswer(_message.Message):
    __slots__ = ("seq", "env_rets", "error")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ENV_RETS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    seq: int
    env_rets: _containers.RepeatedCompositeFieldContainer[_env_ret_pb2.EnvRet]
    error: _session_pb2.ErrorStatus
    def __init__(self, seq: _Optional[int] = ..., env_rets: _Optional[_Iterable[_Union[_env_ret_pb2.EnvRet, _Mapping]]] = ..., error: _Optional[_Union[_session_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("actor", "env", "collect")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    actor: ActorCommand
    env: EnvCommand
    collect: CollectRound
    def __init__(self, actor: _Optional[_Union[ActorCommand, str]] = ..., env: _Optional[_Union[EnvCommand, str]] = ..., collect: _Optional[_Union[CollectRound, _Mapping]] = ...) -> None: ...

class CollectRound(_message.Message):
    __slots__ = ("begin", "steps")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    begin: int
    steps: int
    def __init__(self, begin: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("actor_running", "collected")
    ACTOR_RUNNING_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_FIELD_NUMBER: _ClassVar[int]
    actor_running: bool
    collected: bool
    def __init__(self, actor_running: _Optional[bool] = ..., collected: _Optional[bool] = ...) -> None: ...

class EnvServiceDescribeRequest(_message.Message):
    __slots__ = ("episode_cursor", "trace_cursor", "timing", "max_episodes", "max_traces")
    EPISODE_CURSOR_FIELD_NUMBER: _ClassVar[int]
    TRACE_CURSOR_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODES_FIELD_NUMBER: _ClassVar[int]
    MAX_TRACES_FIELD_NUMBER: _ClassVar[int]
    episode_cursor: int
    trace_cursor: int
    timing: _session_pb2.Timing
    max_episodes: int
    max_traces: int
    def __init__(self, episode_cursor: _Optional[int] = ..., trace_cursor: _Optional[int] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ..., max_episodes: _Optional[int] = ..., max_traces: _Optional[int] = ...) -> None: ...

class EnvServiceDescribeResponse(_message.Message):
    __slots__ = ("library_version", "envs", "actor_running", "env_steps", "episodes", "episode_cursor", "stats", "external_env_ids", "traces", "trace_cursor", "timing")
    LIBRARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENVS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ENV_STEPS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    EPISODE_CURSOR_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_ENV_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    TRACE_CURSOR_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    library_version: str
    envs: _containers.RepeatedCompositeFieldContainer[_space_pb2.EnvMeta]
    actor_running: bool
    env_steps: int
    episodes: _containers.RepeatedCompositeFieldContainer[EpisodeRecord]
    episode_cursor: int
    stats: _tensor_pb2.Value
    external_env_ids: _containers.RepeatedScalarFieldContainer[str]
    traces: _containers.RepeatedCompositeFieldContainer[StepTrace]
    trace_cursor: int
    timing: _session_pb2.Timing
    def __init__(self, library_version: _Optional[str] = ..., envs: _Optional[_Iterable[_Union[_space_pb2.EnvMeta, _Mapping]]] = ..., actor_running: _Optional[bool] = ..., env_steps: _Optional[int] = ..., episodes: _Optional[_Iterable[_Union[EpisodeRecord, _Mapping]]] = ..., episode_cursor: _Optional[int] = ..., stats: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., external_env_ids: _Optional[_Iterable[str]] = ..., traces: _Optional[_Iterable[_Union[StepTrace, _Mapping]]] = ..., trace_cursor: _Optional[int] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("env_id", "seq", "start_ns", "duration_ns", "spans", "uncertainty_ns")
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_NS_FIELD_NUMBER: _ClassVar[int]
    env_id: str
    seq: int
    start_ns: int
    duration_ns: int
    spans: _containers.RepeatedCompositeFieldContainer[StageSpan]
    uncertainty_ns: int
    def __init__(self, env_id: _Optional[str] = ..., seq: _Optional[int] = ..., start_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., uncertainty_ns: _Optional[int] = ...) -> None: ...

class StageSpan(_message.Message):
    __slots__ = ("stage", "start_ns", "duration_ns")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    start_ns: int
    duration_ns: int
    def __init__(self, stage: _Optional[str] = ..., start_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ...) -> None: ...

class EpisodeRecord(_message.Message):
    __slots__ = ("env_id", "row", "episode_id", "episode_return", "length", "seed", "policy_version", "reason", "ts_end_ns")
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_RETURN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TS_END_NS_FIELD_NUMBER: _ClassVar[int]
    env_id: str
    row: int
    episode_id: int
    episode_return: float
    length: int
    seed: int
    policy_version: int
    reason: str
    ts_end_ns: int
    def __init__(self, env_id: _Optional[str] = ..., row: _Optional[int] = ..., episode_id: _Optional[int] = ..., episode_return: _Optional[float] = ..., length: _Optional[int] = ..., seed: _Optional[int] = ..., policy_version: _Optional[int] = ..., reason: _Optional[str] = ..., ts_end_ns: _Optional[int] = ...) -> None: ...
