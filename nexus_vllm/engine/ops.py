"""Which implementation of scoring, selecting, copying and shifting a worker uses.

Every kernel in `nexus_vllm.kernels` stands beside a reference in plain torch that computes the
same. On a GPU the kernels run; elsewhere the references do, unless Triton interprets them.
"""

import os

import torch

ENVIRONMENT = "NEXUS_VLLM_KERNELS"
"""`triton` or `torch`, to use kernels, or references, whatever the device."""


def use_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on this device. Raises ValueError on an unknown choice."""
    choice = os.environ.get(ENVIRONMENT, "")
    if choice not in ("", "triton", "torch"):
        raise ValueError(f"{ENVIRONMENT} is {choice!r}, must be triton or torch")
    return choice == "triton" if choice else device.type == "cuda"
