"""A device that counts: its tensors say that they are on a GPU, and their values are in host memory.
Operations are counted, and which would copy between the two, and which would make the host wait."""

import collections
import contextlib
import unittest.mock

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")
# The result of these depends on values: the host waits for them.
_WAITS = {"nonzero", "_local_scalar_dense", "equal", "masked_select", "is_nonzero", "unique"}


class DeviceTensor(torch.Tensor):
    """On DEVICE. content: its values."""

    @staticmethod
    def __new__(cls, content):
        return torch.Tensor._make_wrapper_subclass(cls, content.shape, strides=content.stride(),
                                                   dtype=content.dtype, device=DEVICE)

    def __init__(self, content):
        self.content = content

    def data_ptr(self):
        return self.content.data_ptr()

    # PyTorch's own ask the driver. Places are integers and slices.
    def contiguous(self):
        return self.clone(memory_format=torch.contiguous_format)

    def __getitem__(self, index):
        return DeviceTensor(self.content[index])

    def __setitem__(self, index, value):
        self.content[index] = value.content

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func}: outside of counted()")


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        target = kwargs.get("device")
        there = here if target is None else torch.device(target) == DEVICE
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        moves = name == "_to_copy" and here != there or name in ("copy_", "copy") and (
            isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor))
        if moves:
            to_device = there if name == "_to_copy" else isinstance(args[0], DeviceTensor)
            self.counts["to device" if to_device else "to host"] += 1
            self.counts["waits"] += not kwargs.get("non_blocking")
        elif here:
            by_mask = name in ("index", "index_put", "index_put_") and any(
                index is not None and index.dtype == torch.bool for index in args[1])
            self.counts["waits"] += name in _WAITS or by_mask
        plain = _pytree.tree_map_only(DeviceTensor, lambda tensor: tensor.content, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if not there:
            return result
        return _pytree.tree_map_only(torch.Tensor, lambda tensor: self._wrapped(tensor, tensors), result)

    @staticmethod
    def _wrapped(result, tensors):
        """In place operations return their argument."""
        for tensor in tensors:
            if isinstance(tensor, DeviceTensor) and tensor.content is result:
                return tensor
        return DeviceTensor(result)


@contextlib.contextmanager
def counted():
    """Tensors of DEVICE work inside. Gives a Counter: "to host", "to device", "waits", and each operation."""
    with unittest.mock.patch.object(torch.cuda, "_lazy_init"), _Counting() as mode:  # there may be no driver
        yield mode.counts
