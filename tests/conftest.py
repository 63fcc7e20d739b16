"""What holds for every test: JAX runs on the CPU and is strict about ranks, and no test needs a network or a screen.

The variables are set before anything imports JAX, which reads them once; one that is already set stays as it is.
Property tests have no deadline: on a machine that others use too, time says nothing about the code.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

settings.register_profile("statelm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("statelm")
