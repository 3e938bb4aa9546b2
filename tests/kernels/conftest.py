"""Kernels in Triton's interpreter: what they compute, not how fast, and not for which hardware.

In a process of its own, since Triton decides as it is imported whether it interprets:

    TRITON_INTERPRET=1 python -m pytest tests/kernels
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/kernels runs by itself, with TRITON_INTERPRET=1 set")
