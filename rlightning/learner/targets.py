"""Target networks: copies that follow the trained ones."""

from __future__ import annotations

from torchrl.objectives import HardUpdate, LossModule, SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater


def make_target_updater(loss: LossModule, tau: float) -> TargetNetUpdater:
    """Returns what moves a loss's target networks towards the trained ones, with `step`.

    Args:
        loss: Has target networks.
        tau: What part of the way one step goes; 1 copies.
    """
    if tau == 1.0:
        return HardUpdate(loss, value_network_update_interval=0)  # of steps left out between
    return SoftUpdate(loss, tau=tau)
