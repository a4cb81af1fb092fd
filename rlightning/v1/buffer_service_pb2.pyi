from rlightning.v1 import env_ret_pb2 as _env_ret_pb2
from rlightning.v1 import policy_response_pb2 as _policy_response_pb2
from rlightning.v1 import session_pb2 as _session_pb2
from rlightning.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InsertRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "insert", "timing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    INSERT_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    hello: InsertHello
    heartbeat: _session_pb2.Heartbeat
    insert: InsertItems
    timing: _session_pb2.Timing
    def __init__(self, hello: _Optional[_Union[InsertHello, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., insert: _Optional[_Union[InsertItems, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class InsertHello(_message.Message):
    __slots__ = ("session", "writer_id", "storage_id", "tables")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Hello
    writer_id: str
    storage_id: str
    tables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[_Union[_session_pb2.Hello, _Mapping]] = ..., writer_id: _Optional[str] = ..., storage_id: _Optional[str] = ..., tables: _Optional[_Iterable[str]] = ...) -> None: ...

class InsertItems(_message.Message):
    __slots__ = ("seq", "epoch", "items", "table")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: int
    items: _containers.RepeatedCompositeFieldContainer[InsertItem]
    table: str
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[int] = ..., items: _Optional[_Iterable[_Union[InsertItem, _Mapping]]] = ..., table: _Optional[str] = ...) -> None: ...

class InsertItem(_message.Message):
    __slots__ = ("env_ret", "response", "cut_rows", "new_segment")
    ENV_RET_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CUT_ROWS_FIELD_NUMBER: _ClassVar[int]
    NEW_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    env_ret: _env_ret_pb2.EnvRet
    response: _policy_response_pb2.PolicyResponse
    cut_rows: _containers.RepeatedScalarFieldContainer[int]
    new_segment: bool
    def __init__(self, env_ret: _Optional[_Union[_env_ret_pb2.EnvRet, _Mapping]] = ..., response: _Optional[_Union[_policy_response_pb2.PolicyResponse, _Mapping]] = ..., cut_rows: _Optional[_Iterable[int]] = ..., new_segment: _Optional[bool] = ...) -> None: ...

class InsertResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat", "ack", "drain", "timing")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    welcome: InsertWelcome
    heartbeat: _session_pb2.Heartbeat
    ack: InsertAck
    drain: _session_pb2.Drain
    timing: _session_pb2.Timing
    def __init__(self, welcome: _Optional[_Union[InsertWelcome, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., ack: _Optional[_Union[InsertAck, _Mapping]] = ..., drain: _Optional[_Union[_session_pb2.Drain, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class InsertWelcome(_message.Message):
    __slots__ = ("session", "storage_id", "next_seq", "max_items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Welcome
    storage_id: str
    next_seq: int
    max_items: int
    def __init__(self, session: _Optional[_Union[_session_pb2.Welcome, _Mapping]] = ..., storage_id: _Optional[str] = ..., next_seq: _Optional[int] = ..., max_items: _Optional[int] = ...) -> None: ...

class InsertAck(_message.Message):
    __slots__ = ("seq", "expected_seq", "error", "withheld", "blocked")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SEQ_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    expected_seq: int
    error: _session_pb2.ErrorStatus
    withheld: int
    blocked: _session_pb2.ErrorStatus
    def __init__(self, seq: _Optional[int] = ..., expected_seq: _Optional[int] = ..., error: _Optional[_Union[_session_pb2.ErrorStatus, _Mapping]] = ..., withheld: _Optional[int] = ..., blocked: _Optional[_Union[_session_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "credit", "ack", "timing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    hello: SampleHello
    heartbeat: _session_pb2.Heartbeat
    credit: SampleCredit
    ack: SampleAck
    timing: _session_pb2.Timing
    def __init__(self, hello: _Optional[_Union[SampleHello, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., credit: _Optional[_Union[SampleCredit, _Mapping]] = ..., ack: _Optional[_Union[SampleAck, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class SampleHello(_message.Message):
    __slots__ = ("session", "table", "rank", "world_size", "batch_size", "where", "fractions")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    FRACTIONS_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Hello
    table: str
    rank: int
    world_size: int
    batch_size: int
    where: SampleWhere
    fractions: _containers.RepeatedCompositeFieldContainer[TableFraction]
    def __init__(self, session: _Optional[_Union[_session_pb2.Hello, _Mapping]] = ..., table: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., batch_size: _Optional[int] = ..., where: _Optional[_Union[SampleWhere, _Mapping]] = ..., fractions: _Optional[_Iterable[_Union[TableFraction, _Mapping]]] = ...) -> None: ...

class TableFraction(_message.Message):
    __slots__ = ("table", "fraction")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    table: str
    fraction: float
    def __init__(self, table: _Optional[str] = ..., fraction: _Optional[float] = ...) -> None: ...

class SampleWhere(_message.Message):
    __slots__ = ("min_version", "max_version", "sources")
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    min_version: int
    max_version: int
    sources: _containers.RepeatedScalarFieldContainer[_env_ret_pb2.ActionSource]
    def __init__(self, min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[_env_ret_pb2.ActionSource, str]]] = ...) -> None: ...

class SampleCredit(_message.Message):
    __slots__ = ("batches", "batch_size")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    batches: int
    batch_size: int
    def __init__(self, batches: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...

class SampleAck(_message.Message):
    __slots__ = ("batch_id",)
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    def __init__(self, batch_id: _Optional[int] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat", "chunk", "drain", "error", "timing")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    welcome: SampleWelcome
    heartbeat: _session_pb2.Heartbeat
    chunk: SampleChunk
    drain: _session_pb2.Drain
    error: _session_pb2.ErrorStatus
    timing: _session_pb2.Timing
    def __init__(self, welcome: _Optional[_Union[SampleWelcome, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., chunk: _Optional[_Union[SampleChunk, _Mapping]] = ..., drain: _Optional[_Union[_session_pb2.Drain, _Mapping]] = ..., error: _Optional[_Union[_session_pb2.ErrorStatus, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class SampleWelcome(_message.Message):
    __slots__ = ("session", "storage_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ID_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Welcome
    storage_id: str
    def __init__(self, session: _Optional[_Union[_session_pb2.Welcome, _Mapping]] = ..., storage_id: _Optional[str] = ...) -> None: ...

class SampleChunk(_message.Message):
    __slots__ = ("batch_id", "total_bytes", "offset", "data", "stays")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    total_bytes: int
    offset: int
    data: bytes
    stays: bool
    def __init__(self, batch_id: _Optional[int] = ..., total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., stays: _Optional[bool] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("batch_id", "columns", "metadata")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    columns: _tensor_pb2.Value
    metadata: _tensor_pb2.Value
    def __init__(self, batch_id: _Optional[int] = ..., columns: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., metadata: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("table", "indices", "all", "first", "limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: str
    indices: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    first: int
    limit: int
    def __init__(self, table: _Optional[str] = ..., indices: _Optional[_Iterable[int]] = ..., all: _Optional[bool] = ..., first: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("total_bytes", "offset", "data")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    offset: int
    data: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("table", "env_ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ENV_IDS_FIELD_NUMBER: _ClassVar[int]
    table: str
    env_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table: _Optional[str] = ..., env_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ("truncated",)
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    truncated: int
    def __init__(self, truncated: _Optional[int] = ...) -> None: ...

class DiscardEpisodeRequest(_message.Message):
    __slots__ = ("table", "env_id", "request_id")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    table: str
    env_id: str
    request_id: str
    def __init__(self, table: _Optional[str] = ..., env_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DiscardEpisodeResponse(_message.Message):
    __slots__ = ("discarded",)
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    discarded: int
    def __init__(self, discarded: _Optional[int] = ...) -> None: ...

class UpdatePrioritiesRequest(_message.Message):
    __slots__ = ("table", "indices", "generations", "priorities")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    table: str
    indices: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    priorities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, table: _Optional[str] = ..., indices: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., priorities: _Optional[_Iterable[float]] = ...) -> None: ...

class UpdatePrioritiesResponse(_message.Message):
    __slots__ = ("updated",)
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    updated: int
    def __init__(self, updated: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: str
    def __init__(self, table: _Optional[str] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("cleared",)
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    cleared: int
    def __init__(self, cleared: _Optional[int] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("hold", "keep")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    hold: bool
    keep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hold: _Optional[bool] = ..., keep: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("name", "total_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    total_bytes: int
    def __init__(self, name: _Optional[str] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class BufferServiceDescribeRequest(_message.Message):
    __slots__ = ("table", "timing")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    table: str
    timing: _session_pb2.Timing
    def __init__(self, table: _Optional[str] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class BufferServiceDescribeResponse(_message.Message):
    __slots__ = ("library_version", "storage_id", "tables", "stats", "timing")
    LIBRARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    library_version: str
    storage_id: str
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    stats: _tensor_pb2.Value
    timing: _session_pb2.Timing
    def __init__(self, library_version: _Optional[str] = ..., storage_id: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., stats: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "size", "capacity", "writers", "inserted_total", "sampled_total")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    INSERTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    capacity: int
    writers: int
    inserted_total: int
    sampled_total: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., capacity: _Optional[int] = ..., writers: _Optional[int] = ..., inserted_total: _Optional[int] = ..., sampled_total: _Optional[int] = ...) -> None: ...
