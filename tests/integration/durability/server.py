"""The buffer server with segments so small that a new one begins all the time; run as the service is."""

from __future__ import annotations

from rlightning.buffer.durable import journal
from rlightning.services.buffer_server.__main__ import main

if __name__ == "__main__":
    journal.SEGMENT_BYTES = 64 * 1024
    main()
