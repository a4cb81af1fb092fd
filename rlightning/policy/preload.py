"""Loads torch's libraries without holding up the other threads of the process."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path


def preload_torch() -> None:
    """Opens the largest library of torch, so that importing torch later finds it open. Blocks.

    Python's import holds the interpreter's lock while the system links a library, for 0.3 s with
    this one; a probe of the server would wait for as long. A call through ctypes does not hold it.
    Where there is no such library, the import does all the work, as ever.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None or os.name != "posix":
        return
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    dlopen.restype = ctypes.c_void_p
    dlopen(os.fsencode(library), os.RTLD_NOW)
