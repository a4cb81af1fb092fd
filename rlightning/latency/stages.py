"""The stages of a step, and what is recorded of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlightning.latency.stats import Durations, StampKind
from rlightning.latency.ways import Array, OneWay, one_message, one_way

STAGES = {
    "encode": "from an observation's turn to be asked about until its request is encoded",
    "uplink": "from then until the policy server has the request; between two clocks",
    "queue": "from receipt until its batch begins to form, decoding included",
    "batch_wait": "from then until inference begins",
    "inference": "inference",
    "answer": "from the end of inference until the answer is sent, encoding included",
    "downlink": "from then until the answer is here; between two clocks",
    "decode": "from then until the actor has the answer",
    "insert": "handing observation and answer over to the buffer, which waits when it is full",
    "env_step": "executing the answer until the next observation is there",
}
"""What a step of the actor loop is made of, in order: each stage begins where the last one ends."""


class ActStamps(NamedTuple):
    """What is recorded of one answer of a policy server.

    Stamps are in nanoseconds of the asking process's monotonic clock, those of the server in
    nanoseconds of its own.
    """

    done_ns: int
    """When the actor had the answer."""
    begun_ns: int
    """When it was the request's turn to be encoded."""
    encoded_ns: int
    """When it was encoded."""
    received_ns: int
    """When the server had it."""
    sent_ns: int
    """When the server sent the answer."""
    heard_ns: int
    """When the answer was here."""
    queue_us: int
    """Microseconds from its receipt until its batch began to form."""
    batch_wait_us: int
    """From then until inference began."""
    inference_us: int
    """Inference."""
    lower_ns: float
    """The least that the server's clock may be ahead; NaN while that is unknown."""
    upper_ns: float
    """The most."""


def _read_act(stamps: Array) -> Durations:
    done, begun, encoded, received, sent, heard, queue, wait, inference, lower, upper = stamps
    queue, wait, inference = queue * 1000, wait * 1000, inference * 1000
    uplink, downlink, half = one_way(received - encoded, heard - sent, lower, upper)
    answer = np.maximum(0, sent - received - queue - wait - inference)
    return Durations(
        (
            *(encoded - begun, uplink, queue, wait, inference, answer, downlink),
            *(done - heard, done - begun),
        ),
        {"uplink": half, "downlink": half},
    )


ACT = StampKind([*[*STAGES][:8], "act"], len(ActStamps._fields), _read_act)
"""The stages of an answer, `encode` to `decode`, and the whole as `act`; of `ActStamps`."""


def _read_step(stamps: Array) -> Durations:
    stepped, asked, answered, stored = stamps
    return Durations(
        (answered - asked, stored - answered, stored - asked, stepped - stored, stepped - asked), {}
    )


STEP = StampKind(["round_trip", "insert", "action_age", "env_step", "step"], 4, _read_step)
"""A step of an actor: when it was over, asked for, answered, and stored."""


def _read_wait(stamps: Array) -> Durations:
    started, formed, received = stamps
    joined = np.maximum(formed, received)
    return Durations((joined - received, started - joined), {})


WAIT = StampKind(["queue", "batch_wait"], 3, _read_wait)
"""How a request waited: when inference began, its batch to form, and when it was received."""


def _read_batch(stamps: Array) -> Durations:
    ended, started, *_ = stamps
    return Durations((*_read_wait(stamps[1:]).columns, ended - started), {})


BATCH = StampKind([*WAIT.names, "inference"], 4, _read_batch)
"""A batch with the first of its requests: when inference ended; then as `WAIT`."""


def _read_insert(stamps: Array) -> Durations:
    heard, sent, left, received, lower, upper = stamps
    uplink, half = one_message(received - sent, lower, upper)
    return Durations((heard - sent, sent - left + uplink), {"env_to_buffer": half})


INSERT = StampKind(["insert_ack", "env_to_buffer"], 6, _read_insert)
"""An insert: when its ack was here, when it was sent, and when what it brings left its env; when
the buffer server had it, by that server's clock; and the least and the most that this clock may be
ahead of ours. The last three are NaN where that is not known."""


def _read_store(stamps: Array) -> Durations:
    stored, begun = stamps
    return Durations((stored - begun,), {})


STORE = StampKind(["store"], 2, _read_store)
"""An insert at the buffer server: when it was stored, and when that began."""


class ActTimes(NamedTuple):
    """Where the time of one answer of a policy server went, in nanoseconds.

    Stamps are those of the asking process's monotonic clock.
    """

    seq: int
    """Number of the request."""
    begun_ns: int
    """When it was its turn to be encoded."""
    encoded_ns: int
    """When it was encoded."""
    queue_ns: int
    """From its receipt until its batch began to form."""
    batch_wait_ns: int
    """From then until inference began."""
    inference_ns: int
    """Inference."""
    server_ns: int
    """From its receipt until its answer was sent."""
    heard_ns: int
    """When the answer was here."""
    done_ns: int
    """When the actor had it."""
    ways: OneWay | None
    """How long the request and the answer were under way; None while that is unknown."""

    @classmethod
    def of(cls, seq: int, stamps: ActStamps) -> ActTimes:
        """Returns the times of an answer by its stamps."""
        return cls(
            seq,
            stamps.begun_ns,
            stamps.encoded_ns,
            max(0, stamps.queue_us) * 1000,
            max(0, stamps.batch_wait_us) * 1000,
            max(0, stamps.inference_us) * 1000,
            max(0, stamps.sent_ns - stamps.received_ns),
            stamps.heard_ns,
            stamps.done_ns,
            OneWay.of(
                *(stamps.received_ns - stamps.encoded_ns, stamps.heard_ns - stamps.sent_ns),
                *(stamps.lower_ns, stamps.upper_ns),
            ),
        )

    @property
    def answer_ns(self) -> int:
        """From the end of inference until the answer was sent."""
        return max(0, self.server_ns - self.queue_ns - self.batch_wait_ns - self.inference_ns)
