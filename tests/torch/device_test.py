"""CUDA tensors of PyTorch in the Python client, without a GPU: CPU tensors that say they are CUDA tensors,
over the fakes of tests/client/python_device_test.py."""

import contextlib
import pathlib
import sys
import types
import unittest
from unittest import mock

try:
    import torch
except ImportError as why:
    print(f"skipped: {why}")
    sys.exit(77)

import flashcore
from flashcore import _device_tensors

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "client"))
import python_device_test as fakes  # noqa: E402

HEADS, DIM = fakes.HEADS, fakes.DIM
SHAPE = (3, HEADS, DIM)


class Cuda(torch.Tensor):
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


def cuda(tensor):
    return tensor.as_subclass(Cuda)


def plain(tensor):
    return tensor.as_subclass(torch.Tensor)


_from_dlpack = torch.from_dlpack


def from_dlpack(capsule):
    return cuda(_from_dlpack(capsule))


class TorchDeviceTest(unittest.TestCase):
    setUp, config = fakes.DeviceTest.setUp, fakes.DeviceTest.config

    def run(self, result=None):
        stream = types.SimpleNamespace(cuda_stream=fakes.STREAM)
        with mock.patch.multiple(torch.cuda, current_stream=lambda device=None: stream,
                                 ExternalStream=lambda handle, device: handle,
                                 stream=lambda handle: contextlib.nullcontext()), \
                mock.patch.object(torch, "from_dlpack", from_dlpack), \
                mock.patch.object(_device_tensors, "_CUDA", 1):  # kDLCPU
            return super().run(result)

    def tensors(self, dtype, shape=SHAPE):
        return [cuda(torch.randn(shape).to(dtype)) for _ in range(3)]

    def test_results_are_tensors_of_pytorch_on_the_current_stream(self):
        for dtype in (torch.float16, torch.bfloat16):
            q, k, v = self.tensors(dtype)
            o, lse = self.client.attend(q, k, v, return_lse=True)
            self.assertFalse(plain(o).any(), "nothing has run yet")
            self.driver.run()
            self.assertEqual((o.dtype, lse.dtype, tuple(lse.shape)), (dtype, torch.float32, (3, HEADS)))
            self.assertTrue(torch.equal(plain(o), plain(v)))
            self.client.synchronize()

    def test_tensors_of_any_strides_are_copied_by_pytorch(self):
        q, k, v = self.tensors(torch.float16, (HEADS, 3, DIM))
        o = self.client.attend(q, k, v, layout="HND")
        self.driver.run()
        self.assertEqual(self.driver.copies, 0)
        self.assertTrue(torch.equal(plain(o), plain(v)))

    def test_device_empty_is_used_in_place_also_in_parts(self):
        for dtype in (torch.float16, torch.bfloat16):
            memory = self.client.device_empty((6, HEADS, DIM), dtype)
            self.assertEqual((memory.dtype, tuple(memory.shape)), (dtype, (6, HEADS, DIM)))
            plain(memory)[:] = torch.randn(6, HEADS, DIM)
            part = cuda(plain(memory)[3:])
            o = self.client.attend(part, part, part)
            self.driver.run()
            self.assertEqual(self.driver.copies, 0)
            self.assertTrue(torch.equal(plain(o), plain(part)))

    def test_a_result_keeps_its_memory(self):
        o = self.client.attend(*self.tensors(torch.float16))
        address = o.data_ptr()
        part = plain(o)[:1]
        del o
        other = self.client.attend(*self.tensors(torch.float16))
        self.assertNotEqual(other.data_ptr(), address)
        del part
        self.assertEqual(self.client.attend(*self.tensors(torch.float16)).data_ptr(), address)

    def test_wrong_tensors(self):
        q, k, v = self.tensors(torch.float16)
        for pattern, tensor in (("q: requires a gradient", plain(q).clone().requires_grad_()),
                                ("q: has dtype float32", plain(q).float())):
            with self.assertRaisesRegex(flashcore.InvalidArgument, pattern):
                self.client.attend(cuda(tensor), k, v)
        with mock.patch.object(Cuda, "device", property(lambda self: torch.device("cuda", 1))):
            with self.assertRaisesRegex(flashcore.InvalidArgument, "q: is on GPU 1; allowed: .*0"):
                self.client.attend(q, k, v)


if __name__ == "__main__":
    unittest.main()
