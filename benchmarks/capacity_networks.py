"""What networks take: memory of a learner, measured, and of a GPU memory and time, computed and not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIB = 2**20
FLOAT = 4
# Of Adam (Kingma and Ba, 2015): weights, gradients and two moments.
ADAM = 4


@dataclass(frozen=True)
class Network:
    """What counts of a network.

    Attributes:
        parameters: Numbers that are learned.
        macs: Multiplications with an addition that the answer for one row takes.
        outputs: Numbers that its layers put out for one row, which a backward pass needs again.
    """

    parameters: int
    macs: int
    outputs: int

    def __add__(self, other: Network) -> Network:
        return Network(
            self.parameters + other.parameters,
            self.macs + other.macs,
            self.outputs + other.outputs,
        )


def layers(
    shape: Sequence[int],
    *,
    convolutions: Sequence[Sequence[int]] = (),
    hidden: Sequence[int] = (),
    outputs: int,
) -> Network:
    """Returns a network of convolutions and then dense layers.

    Args:
        shape: Of an observation: a vector, or channels, height and width of a picture.
        convolutions: Channels, kernel and stride of each, as `policy.model_cfg` has them.
        hidden: Widths of the dense layers.
        outputs: Width of the last.
    """
    network = Network(0, 0, 0)
    size = list(shape)
    for channels, kernel, stride in convolutions:
        height, width = ((side - kernel) // stride + 1 for side in size[1:])
        weights = channels * size[0] * kernel**2
        places = height * width
        network += Network(weights + channels, weights * places, channels * places)
        size = [channels, height, width]
    width = math.prod(size)
    for following in (*hidden, outputs):
        network += Network((width + 1) * following, width * following, following)
        width = following
    return network


@dataclass(frozen=True)
class TrainingSize:
    """What the memory of a learner goes by.

    Attributes:
        weights: Bytes of the networks that it trains.
        batch: Bytes of the observations in a batch, both of a transition.
        outputs: Bytes of what the layers put out for a batch.
    """

    weights: float
    batch: float
    outputs: float


@dataclass(frozen=True)
class LearnerMemory:
    """The memory of a learner whose device is the CPU.

    Attributes:
        base_mib: Of one whose networks and batches are small.
        weights: Bytes for each byte of weights.
        batch: Bytes for each byte of observations in a batch.
        outputs: Bytes for each byte that layers put out for a batch.
    """

    base_mib: float
    weights: float
    batch: float
    outputs: float

    @classmethod
    def fit(cls, sizes: Sequence[TrainingSize], found_mib: Sequence[float]) -> LearnerMemory:
        """Returns what is nearest to the MiB that were found, by least squares."""
        matrix = np.array([[MIB, one.weights, one.batch, one.outputs] for one in sizes]) / MIB
        solution, *_ = np.linalg.lstsq(matrix, np.asarray(found_mib), rcond=None)
        return cls(*(float(one) for one in solution))

    def mib(self, size: TrainingSize) -> float:
        """Returns how many MiB a learner takes."""
        kinds = ("weights", "batch", "outputs")
        return self.base_mib + sum(getattr(self, k) * getattr(size, k) for k in kinds) / MIB


@dataclass(frozen=True)
class Gpu:
    """A GPU, as its data sheet has it.

    Attributes:
        name: What it is called.
        flops: Floating point operations a second, in float32.
        reached: Part of them that small networks get to; an assumption.
    """

    name: str
    flops: float
    reached: float = 0.1


def acting(network: Network, rows: float, gpu: Gpu) -> float:
    """Returns which part of a GPU so many answers a second take: two operations for each of `macs`."""
    return 2 * network.macs * rows / (gpu.flops * gpu.reached)


def learning(network: Network, rows: float, gpu: Gpu) -> float:
    """Returns which part of a GPU it takes to learn from so many rows a second.

    A backward pass takes twice the operations of a forward pass (Kaplan et al., 2020, section 2.1).
    """
    return 3 * acting(network, rows, gpu)


def acting_mib(network: Network, rows: int, nbytes: int) -> float:
    """Returns MiB of a policy server's tensors on a GPU, beside what CUDA takes itself.

    Args:
        network: What acts; there are two while weights are published.
        rows: `policy.max_batch_rows`.
        nbytes: Size of one row's observation; it is there as it came and as float32.
    """
    per_row = 5 * nbytes + FLOAT * network.outputs
    return (2 * FLOAT * network.parameters + rows * per_row) / MIB


def learning_mib(network: Network, rows: int, nbytes: int, *, observations: int = 1) -> float:
    """Returns MiB of a learner's tensors on a GPU, beside what CUDA takes itself.

    Args:
        network: What is trained, with Adam.
        rows: Rows in a minibatch.
        nbytes: Size of one row's observation, of bytes.
        observations: Observations of each row: 1 of a rollout, 2 of a transition.
    """
    per_row = observations * 5 * nbytes + 2 * FLOAT * network.outputs
    return (ADAM * FLOAT * network.parameters + rows * per_row) / MIB
