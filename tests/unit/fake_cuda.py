"""A GPU that is not there: whether code mixes devices, or waits for one, without running on it."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda:0")
_aten = torch.ops.aten
_DIRECTLY = {Tensor.copy_: _aten.copy_, Tensor.__invert__: _aten.bitwise_not}
_READING = (
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist,
    Tensor.numpy, Tensor.nonzero,
)  # fmt: skip
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


def _indexed(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """What `tensor[key]` shows before tensors of the key pick from it; and those, by dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(part is not None and part is not Ellipsis for part in keys)
    if not any(part is Ellipsis for part in keys):
        keys.append(Ellipsis)
    place = next(i for i, part in enumerate(keys) if part is Ellipsis)
    keys[place : place + 1] = [slice(None)] * (tensor.ndim - taken)
    picks: list[Tensor | None] = []
    for part in keys:
        dim = len(picks)
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            tensor = _aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor) and part.ndim:
            assert part.dtype != torch.bool, "how many are marked is in the GPU"
            picks.append(part)
            continue
        else:
            tensor = tensor.select(dim, int(part))
            continue
        picks.append(None)
    return tensor, picks if any(pick is not None for pick in picks) else []


class _Calls(TorchFunctionMode):
    """Calls on fake tensors for which torch asks for the driver, unless it is built with one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not args or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        assert func not in _READING, f"{func} waits for the GPU"
        if func in _DIRECTLY:
            return _DIRECTLY[func](*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            shown, picks = _indexed(*args)
            return _aten.index(shown, picks) if picks else shown
        if func is Tensor.__setitem__:
            (shown, picks), value = _indexed(*args[:2]), args[2]
            if picks:
                _aten.index_put_(shown, picks, value)
            elif isinstance(value, Tensor):
                _aten.copy_(shown, value)
            else:
                _aten.fill_(shown, value)
            return None
        return func(*args, **(kwargs or {}))


class FakeCuda(TorchDispatchMode):
    """Inside, tensors on `CUDA` have shapes and no contents, and those on the CPU are real.

    What would have to read from the GPU raises: numbers, branches, shapes that depend on contents,
    and copies to the host, except for as many as there are `answers`, which they give instead. So
    does what takes tensors of both devices, indices on the CPU included.
    """

    def __init__(self, answers: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.calls = _Calls()
        self.answers = list(answers)

    def __enter__(self) -> "FakeCuda":
        self.fake.__enter__()  # below this mode: torch then leaves the GPU's driver alone
        super().__enter__()
        self.calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.calls.__exit__(*error)
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        asked = kwargs.get("device")
        if not there and (asked is None or torch.device(asked).type == "cpu"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _aten._to_copy.default and asked is not None:
            if torch.device(asked).type == "cpu":
                return self._read(tensors[0])
        elif func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            raise AssertionError("a copy to the host waits for the GPU")
        elif func not in _COPIES:
            strays = [t for t in tensors if not isinstance(t, FakeTensor) and t.ndim]
            assert not strays, f"{func} takes a tensor of shape {strays[0].shape} on the CPU"
        return func(*args, **kwargs)

    def _read(self, tensor: Tensor) -> Tensor:
        assert self.answers, f"a copy of {tuple(tensor.shape)} to the host waits for the GPU"
        answer = self.answers.pop(0)
        assert answer.shape == tensor.shape
        assert answer.dtype == tensor.dtype
        return answer
