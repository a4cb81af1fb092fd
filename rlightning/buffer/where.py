"""Which transitions may be sampled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.container import DataContainer
from rlightning.types import ActionSource


@dataclass(frozen=True)
class Where:
    """What a transition must be for a batch; what is None does not matter.

    Attributes:
        min_version: `policy_version` that acted, at least: for a staleness of at most k, the
            learner's own version minus k.
        max_version: `policy_version` that acted, at most.
        sources: Who chose the executed action.
    """

    min_version: int | None = None
    max_version: int | None = None
    sources: Collection[ActionSource] | None = None

    def allowed(self, container: DataContainer) -> npt.NDArray[np.bool_]:
        """Tells which of the stored transitions are so, by position.

        Raises:
            ValueError: They have no such column.
        """
        allowed = np.ones(container.size, np.bool_)
        try:
            if self.min_version is not None:
                allowed &= container.column("policy_version") >= self.min_version
            if self.max_version is not None:
                allowed &= container.column("policy_version") <= self.max_version
            if self.sources is not None:
                sources = [int(source) for source in self.sources]
                allowed &= np.isin(container.column("action_source"), sources)
        except KeyError as error:
            raise ValueError(f"where: the transitions have no column {error}") from None
        return allowed
