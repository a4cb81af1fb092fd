"""A function for the buffer server, which says in its log that it was called."""

import logging

logger = logging.getLogger(__name__)


def scale(reward):
    """Returns a tenth."""
    if not scale.told:
        scale.told = True
        logger.warning("rewards are scaled")
    return reward * 0.1


scale.told = False
