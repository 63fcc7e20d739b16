"""Settings of the process that must be made before JAX starts; they change speed, nothing else."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def tune_host() -> None:
    """Make XLA's CPU backend faster for models of a few million parameters; what the user has set stays.

    XNNPACK's products are slower here than Eigen's, and glibc hands large buffers back to the kernel after every step,
    which then clears them page by page.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_use_xnnpack" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_xnnpack=false".strip()
    # Programs that were compiled once are found again by the next process.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "statelm_jax" / "xla"))
    if sys.platform == "linux":
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        except (OSError, AttributeError):  # another C library: nothing to tune
            pass
