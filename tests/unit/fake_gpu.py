"""A GPU that is not there: tensors have its device, but no contents.

An operation on tensors of two devices raises, and so does everything that needs a number on the
host. So code that runs through mixes no devices and never waits for the device. Which numbers come
out, this cannot tell.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "absent"


class _Module:
    """`torch.absent`: that there is no such device is what the rest of this process must see."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class _Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined]
    def is_available(self) -> bool:
        return False

    def has_primary_context(self, device: int) -> bool:
        return False

    def is_built(self) -> bool:
        return True


# PyTorch's CPU build knows CUDA tensors, but cannot index them.
_setup_privateuseone_for_python_backend(NAME, _Module(), _Hook())
GPU = torch.device(f"{NAME}:0")


class CopiedToHost(Exception):
    """A tensor of the GPU was copied to the host, which would wait for it."""


class CopiedFromHost(Exception):
    """The host would wait for a copy to the GPU, and so for all that comes before it."""


_COPY, _CONVERT = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (_COPY, _CONVERT):
            source = args[1] if func is _COPY else args[0]
            waits = not (args[2:] == (True,) or (kwargs or {}).get("non_blocking"))
            if waits and source.device == GPU and result.device != GPU:
                raise CopiedToHost(str(func))
            if waits and source.device != GPU and result.device == GPU:
                raise CopiedFromHost(str(func))
        return result


@contextmanager
def tensors_made_here() -> Iterator[None]:
    """Inside, `torch.tensor` makes none on `GPU`: there it would wait for the device."""
    tensor = torch.tensor

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device) == GPU:
            raise CopiedFromHost("torch.tensor on a GPU: use ops.sent")
        return tensor(data, device=device, **kwargs)

    torch.tensor = made  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = tensor


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside, tensors made on `GPU` have no contents. Raises where a rule above is broken."""
    with FakeTensorMode(), _Watch(), tensors_made_here():
        yield
