"""Section `buffer` of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.utils.config.base import Config
from rlightning.utils.config.rpc import check_address


class SamplerConfig(Config):
    """How a buffer chooses what to sample.

    Attributes:
        type: `all` in order, `batch` at random without replacement, `uniform` with replacement,
            `prioritised` by priority, `sequence` consecutive transitions of one episode.
        seed: Seed of the choice; None draws one.
        alpha: Of `prioritised`: the power of priorities that chances are proportional to; 0 is
            uniform.
        beta: Of `prioritised`: how far `sample_weight` makes up for the chances; 1 is wholly.
        length: Of `sequence`: the number of transitions.
    """

    type: Literal["all", "batch", "uniform", "prioritised", "sequence"]
    seed: int | None = None
    alpha: float = Field(default=0.6, ge=0)
    beta: float = Field(default=0.4, ge=0)
    length: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def check_length(self) -> Self:
        """Wants the length of sequences."""
        if (self.length is None) == (self.type == "sequence"):
            raise ValueError(f"the sampler '{self.type}' and length {self.length} do not fit")
        return self


class FrameStackConfig(Config):
    """An array of the observation that is a stack of frames.

    Attributes:
        axis: Its axis of frames, the oldest first.
    """

    axis: int = 0


class NodeConfig(Config):
    """What runs on one node, by number.

    Attributes:
        buffer: Its shard; one node has one.
        env: Its env workers: what follows the last "-" of their ids.
        train: The ranks of its train workers.
    """

    buffer: list[int]
    env: list[int] = Field(default_factory=list)
    train: list[int] = Field(default_factory=list)


class StorageConfig(Config):
    """Where and how a buffer keeps its rows.

    Attributes:
        mode: `circular` overwrites the oldest when full, `fixed` refuses more.
        type: `unified` is one storage, `sharded` several.
        unit: What capacity and sampling count.
        device: Device of the columns. They are numpy arrays, so that only `cpu` is supported: a
            buffer refuses `cuda`.
        frame_stack: Arrays that are stacks of frames, by path: `observation`, or
            `observation.camera` in a dict. Each frame is stored once.
        removal: What a full `circular` storage overwrites: the oldest transitions (`fifo`), the
            newest (`lifo`), or those of the lowest priority (`priority`), which the sampler
            `prioritised` alone knows. Not `sequence`: without the transitions of lowest priority,
            taken out of the middle of episodes, few sequences would be left; one was tried, and
            after ten times its capacity began at 0.1 to 4 % of the rows, instead of 81 to 84 %.
        compression: Arrays of the observation whose rows are kept compressed, by path as in
            `frame_stack`, and how. None by default.
        num_shards: Of `sharded`: storages in this process, each of `capacity`.
        addresses: Of `sharded`: the buffer servers, one for each shard; of `unified` at most one.
            None of them: storage in this process.
        split: How many rows of a batch each shard gives: as its size (`proportional`), or as many
            as the others (`equal`).
        missing_shards: What to do while a buffer server is away: `error` raises, `skip` samples the
            others.
        missing_after_s: Seconds without a connection after which a buffer server counts as away.
        timeout_s: Seconds that a call waits for buffer servers.
        nodes: For node affinity: what runs on each node, by its name.
    """

    mode: Literal["circular", "fixed"] = "circular"
    type: Literal["unified", "sharded"] = "unified"
    unit: Literal["transition", "episode"] = "transition"
    device: Literal["cpu", "cuda"] = "cpu"
    frame_stack: dict[str, FrameStackConfig] = Field(default_factory=dict)
    removal: Literal["fifo", "lifo", "priority"] = "fifo"
    compression: dict[str, Literal["zlib"]] = Field(default_factory=dict)
    num_shards: int | None = Field(default=None, ge=1)
    addresses: list[str] = Field(default_factory=list)
    split: Literal["proportional", "equal"] = "proportional"
    missing_shards: Literal["error", "skip"] = "error"
    missing_after_s: float = Field(default=2.0, ge=0)
    timeout_s: float = Field(default=30.0, gt=0)
    nodes: dict[str, NodeConfig] = Field(default_factory=dict)

    @field_validator("addresses")
    @classmethod
    def check_addresses(cls, addresses: list[str]) -> list[str]:
        """Refuses what nobody can dial, and one server as two shards."""
        for address in addresses:
            check_address(address)
            if addresses.count(address) > 1:
                raise ValueError(f"'{address}' comes twice: each shard is a server of its own")
        return addresses

    @model_validator(mode="after")
    def check_device(self) -> Self:
        """Refuses sharded storage on another device than the CPU."""
        if self.type == "sharded" and self.device != "cpu":
            raise ValueError(f"sharded storage needs device 'cpu', got '{self.device}'")
        return self

    @model_validator(mode="after")
    def check_shards(self) -> Self:
        """Wants the number of shards to be the same wherever it is said."""
        listed = len(self.addresses)
        if self.type == "unified" and listed > 1:
            raise ValueError(f"{listed} addresses need type 'sharded'")
        if self.type == "sharded" and listed and self.num_shards not in (None, listed):
            raise ValueError(f"num_shards {self.num_shards}, but {listed} addresses")
        return self

    @property
    def shards(self) -> int:
        """Number of shards; 1 unless the storage is sharded."""
        if self.type == "unified":
            return 1
        return self.num_shards or len(self.addresses) or 1


class RateLimiterConfig(Config):
    """How inserting and sampling hold each other back, in transitions or what `storage.unit` says.

    Attributes:
        min_size: What must be stored before anything is sampled.
        samples_per_insert: How often each one shall be sampled, on average; None: as it happens.
        error_buffer: How far `inserted * samples_per_insert - sampled` may be from its value at
            `min_size`, in samples, before inserts (above) or samples (below) wait.
        queue_size: Makes the table a queue instead: each transition is sampled once, in order, and
            inserts wait while so many are there.
    """

    min_size: int = Field(default=1, ge=1)
    samples_per_insert: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    error_buffer: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    queue_size: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def check_mode(self) -> Self:
        """Refuses a mixture of the two modes, and a band that lets nothing through."""
        bounds = self.samples_per_insert is not None or self.min_size != 1
        if self.queue_size is not None and bounds:
            raise ValueError(
                "queue_size: a queue has neither min_size nor samples_per_insert, since each "
                "transition is sampled once"
            )
        if (self.samples_per_insert is None) != (self.error_buffer is None):
            raise ValueError("samples_per_insert and error_buffer: expected both or neither")
        if self.samples_per_insert is not None and self.error_buffer is not None:
            least = max(1.0, self.samples_per_insert)
            if self.error_buffer < least:
                raise ValueError(
                    f"error_buffer: expected at least {least:g}, or neither side could ever move, "
                    f"got {self.error_buffer:g}"
                )
        return self


class FunctionsConfig(Config):
    """Functions of the buffer by name, each as `module:function`; None: the default.

    They are the arguments of `DataBuffer` of the same names, and never come from a client.

    Attributes:
        obs_preprocessor: Transforms observations.
        reward_preprocessor: Transforms rewards.
        env_ret_preprocess_fn: Replaces `default_env_ret_preprocess_fn`.
        policy_resp_preprocess_fn: Replaces `default_policy_resp_preprocess_fn`.
        preprocess_fn: Replaces `default_preprocess_fn`.
        postprocess_fn: Replaces `default_postprocess_fn`; a ReplayBuffer has it.
    """

    obs_preprocessor: str | None = None
    reward_preprocessor: str | None = None
    env_ret_preprocess_fn: str | None = None
    policy_resp_preprocess_fn: str | None = None
    preprocess_fn: str | None = None
    postprocess_fn: str | None = None


class DurabilityConfig(Config):
    """What of a buffer server outlives its process.

    Attributes:
        durability: What an ack promises. `none`: the rows are in memory. `process`: they outlive
            the process, also `kill -9`. `power`: they are on the disk.
        data_dir: Folder of the server's journal and its checkpoints, for this server alone.
        restore: What the server begins with: `none`, nothing; `latest`, everything that `data_dir`
            has; or the name of a checkpoint, and nothing that came after it.
        checkpoint_keep: Checkpoints that are kept; older ones are removed.
        checkpoint_interval_s: Seconds between checkpoints; None: they are made when a client asks,
            and as the journal grows.
    """

    durability: Literal["none", "process", "power"] = "none"
    data_dir: str | None = None
    restore: str = "none"
    checkpoint_keep: int = Field(default=2, ge=1)
    checkpoint_interval_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def check_data_dir(self) -> Self:
        """Wants a folder for what shall outlive the process."""
        if self.data_dir is None:
            for key in ("durability", "restore"):
                if self[key] != "none":
                    raise ValueError(f"{key} '{self[key]}' needs a data_dir")
            if self.checkpoint_interval_s is not None:
                raise ValueError("checkpoint_interval_s needs a data_dir")
        return self


class BufferConfig(DurabilityConfig):
    """Configuration of the data buffer; the keys of `DurabilityConfig` are for a buffer server.

    Attributes:
        type: `RolloutBuffer` hands each row to the learner once; `ReplayBuffer` samples it again
            and again.
        capacity: Rows that one storage holds, in `storage.unit`.
        sampler: Default: `uniform` for a ReplayBuffer, `all` for a RolloutBuffer.
        auto_truncate_episode: Store an episode as soon as the env has ended it.
        storage: Where and how rows are kept.
        node_affinity_env: Keep the rows of an env on the shard of its node.
        node_affinity_train: Give a train worker the shards of its node.
        n_step: Steps that a transition of a ReplayBuffer looks ahead, see `n_step_postprocess_fn`;
            with more than 1, episodes are stored once they have ended.
        n_step_gamma: Discount of one of these steps.
        rollout_length: Steps of every sub-env in one rollout batch (the T of [T, N]).
        max_rollouts: Rollouts that are kept, those under collection and at the learner included;
            inserts wait when there are more. No row is older than so many versions when it is
            learned from, if `rollout_length` is 3 or more.
        columns: More columns: `ts_observed_ns`, when the sensors of the observation were read, Unix
            time in nanoseconds, int64; `action_age`, how many steps before it the executed action
            was asked for, int32.
        max_bytes: What the transitions of all envs may take in memory, in bytes, the storage
            included; half as much again is for messages and batches on their way. None: a third of
            the memory of the machine, or of its container.
        producer_timeout_s: Seconds without an insert after which the learner is told which producer
            is silent.
        rate_limiter: How inserting and sampling hold each other back, for a ReplayBuffer of a
            server; None: they do not.
        functions: Preprocess and postprocess functions by name.
        tables: The tables of a buffer server by name, each with what it has otherwise than this
            section: a key there replaces the same key here as a whole. `max_bytes` is what all
            tables share; those that name none of their own get equal parts of the rest. Empty:
            one table, `default`, as this section says.
    """

    type: Literal["ReplayBuffer", "RolloutBuffer"]
    capacity: int
    sampler: SamplerConfig | None = None
    auto_truncate_episode: bool = False
    storage: StorageConfig = Field(default_factory=StorageConfig)
    node_affinity_env: bool = False
    node_affinity_train: bool = False
    n_step: int = Field(default=1, ge=1)
    n_step_gamma: float = Field(default=0.99, ge=0, le=1)
    rollout_length: int = Field(default=32, ge=1)
    max_rollouts: int = Field(default=2, ge=1)
    columns: list[Literal["ts_observed_ns", "action_age"]] = Field(default_factory=list)
    max_bytes: int | None = Field(default=None, ge=1)
    producer_timeout_s: float = Field(default=60.0, gt=0)
    rate_limiter: RateLimiterConfig | None = None
    functions: FunctionsConfig = Field(default_factory=FunctionsConfig)
    tables: dict[str, TableConfig] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def fill_tables(cls, data: Any) -> Any:
        """Gives each table what it does not name itself."""
        if not isinstance(data, Mapping) or not isinstance(data.get("tables"), Mapping):
            return data
        common = {key: value for key, value in data.items() if key not in _OF_ALL_TABLES}
        tables = {
            name: {**common, **(own or {})} if own is None or isinstance(own, Mapping) else own
            for name, own in data["tables"].items()
        }
        return {**data, "tables": tables}

    @field_validator("tables")
    @classmethod
    def check_tables(cls, tables: dict[str, TableConfig]) -> dict[str, TableConfig]:
        """Refuses names that nobody could ask for, and tables within tables."""
        for name, table in tables.items():
            if not _TABLE_NAME.fullmatch(name):
                raise ValueError(f"expected names of 1 to 64 of A-Za-z0-9._-, got {name!r}")
            if table.tables:
                raise ValueError(f"{name}: a table has no tables of its own")
            for key, field in DurabilityConfig.model_fields.items():
                if table[key] != field.default:
                    raise ValueError(f"{name}.{key}: the server has one for all its tables")
        return tables

    @model_validator(mode="after")
    def setup_default_sampler(self) -> Self:
        """Chooses the sampler that fits the type when none was given."""
        limiter = self.rate_limiter
        queue = limiter is not None and limiter.queue_size is not None
        if self.sampler is None:
            ordered = queue or self.type == "RolloutBuffer"
            self.sampler = SamplerConfig(type="all" if ordered else "uniform")
        if limiter is not None and self.type == "RolloutBuffer":
            raise ValueError("rate_limiter: needs a ReplayBuffer; max_rollouts limits rollouts")
        if queue and self.sampler.type != "all":
            raise ValueError(
                "rate_limiter.queue_size: a queue is sampled in its order; leave sampler out, got "
                f"'{self.sampler.type}'"
            )
        return self

    @model_validator(mode="after")
    def check_shards(self) -> Self:
        """Wants all tables to have the shards of the section, and no queue in them."""
        for name, table in self.tables.items():
            for key in ("type", "num_shards", "addresses", "nodes"):
                mine, own = getattr(self.storage, key), getattr(table.storage, key)
                default = StorageConfig.model_fields[key].get_default(call_default_factory=True)
                if own not in (mine, default):
                    raise ValueError(
                        f"tables.{name}.storage.{key}: shards are those of the whole section, which"
                        f" says {mine!r}, got {own!r}"
                    )
            for key in ("node_affinity_env", "node_affinity_train"):
                if getattr(table, key) != getattr(self, key):
                    raise ValueError(f"tables.{name}.{key}: shards are those of the whole section")
        sections: list[BufferConfig] = [*self.tables.values()] or [self]
        for section in sections:
            limiter = section.rate_limiter
            queue = limiter is not None and limiter.queue_size is not None
            if queue and self.storage.type == "sharded":
                raise ValueError(
                    "rate_limiter.queue_size: a queue is in one buffer server, not in the several "
                    "of storage.type 'sharded'"
                )
        return self


class TableConfig(BufferConfig):
    """One table of a buffer server.

    Attributes:
        envs: Ids of the envs whose rows an env server inserts here, as patterns such as `robot-*`;
            the rows of an env go to every table that names it.
    """

    envs: list[str] = Field(default_factory=lambda: ["*"])


# What a table does not take over from the section.
_OF_ALL_TABLES = frozenset({"tables", "max_bytes", "envs", *DurabilityConfig.model_fields})
_TABLE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

BufferConfig.model_rebuild()
