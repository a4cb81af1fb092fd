"""What of a buffer outlives its process: a journal of what happened, and checkpoints.

What a table holds follows from what was done to it, in order. The journal has that order on disk
before anything is acked; a checkpoint is the state at one position of the journal; recovery loads
one and does again what came after it.
"""
