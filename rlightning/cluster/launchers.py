"""Chooses what starts the services of a run."""

from __future__ import annotations

from collections.abc import Callable

from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.prepare import own_state
from rlightning.cluster.ray_launcher import RayLauncher
from rlightning.cluster.runs import Run
from rlightning.utils.config import MainConfig


def make_launcher(
    config: MainConfig, run: Run, *, on_ray: bool, report: Callable[[str], None]
) -> LocalLauncher:
    """Returns a launcher that has started nothing yet.

    Args:
        config: Config of the run; copied.
        run: Its folder.
        on_ray: Place the services on a running Ray cluster, not in processes here.
        report: Takes one line for people; called from several threads.

    Raises:
        ConfigError: Ray is wanted and not installed.
    """
    if on_ray:
        # The folder of the run is not on every node; the learner publishes again what is lost.
        return RayLauncher(config, run, report=report)
    own_state(config, run.path)
    return LocalLauncher(config, run, report=report)
