"""A GPU that is not there (`fake_gpu`), beside a host whose own numbers are real.

`fake_gpu` gives the host no numbers either. Under uneven budgets it must know how many blocks each
head keeps, so here what is on the CPU is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .fake_gpu import GPU, CopiedFromHost, CopiedToHost, tensors_made_here

_aten = torch.ops.aten


class CountingHost(TorchDispatchMode):
    """Inside, tensors made on `GPU` have no contents, and those on the CPU have.

    What needs a number of the GPU raises, and so do copies to the host, but for as many as there
    are `answers`, which they give instead. So does what takes tensors of both, even as an index.
    """

    def __init__(self, *answers: Tensor) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.made = tensors_made_here()
        self.answers = list(answers)

    def __enter__(self) -> "CountingHost":
        self.fake.__enter__()
        super().__enter__()
        self.made.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.made.__exit__(*error)
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        device = kwargs.get("device")
        if not there and (device is None or torch.device(device) != GPU):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _aten._to_copy.default and device is not None and torch.device(device) != GPU:
            return self._read(tensors[0])
        if func is _aten._to_copy.default and not there:
            if not kwargs.get("non_blocking"):
                raise CopiedFromHost(str(func))
            dtype = kwargs.get("dtype") or tensors[0].dtype
            return _aten.empty(tensors[0].shape, dtype=dtype, device=GPU)
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            if args[2:] == (True,):  # comes whenever it comes
                return args[0]
            raise CopiedToHost(str(func))
        if func is not _aten.copy_.default:
            strays = [t for t in tensors if not isinstance(t, FakeTensor) and t.ndim]
            assert not strays, f"{func} takes a tensor of shape {tuple(strays[0].shape)} on the CPU"
        return func(*args, **kwargs)

    def _read(self, tensor: Tensor) -> Tensor:
        if not self.answers:
            raise CopiedToHost(f"a tensor of shape {tuple(tensor.shape)}")
        answer = self.answers.pop(0)
        assert answer.shape == tensor.shape
        assert answer.dtype == tensor.dtype
        return answer
