"""What holds for all tests."""

import os

# Several tests run at once, each with processes of its own: threads of one network would only wait for each other's turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
