"""Tensors on a GPU in the Python package, with its C library, a server on a fake GPU and a fake driver.

libcuda.so.1 is tests/client/fake_cuda: memory of the GPU is host memory, and a stream is a thread. ctest puts
it first in LD_LIBRARY_PATH.
"""

import ctypes
import gc
import threading
import unittest

import flashcore
import harness
import numpy as np
from local_raw_client import reference

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 2
KINDS = ("contexts", "current", "imports", "reservations", "maps", "registrations")
FLAGS = ("--local_device_tensors", "--device_tensor_bytes=64MiB")


class Tensor:
    """An array as a tensor on the GPU, of another package."""

    def __init__(self, array, stream):
        self.array = array
        self.__cuda_array_interface__ = dict(shape=array.shape, typestr=array.dtype.str, version=3,
                                             data=(array.ctypes.data, False), stream=stream)


def content(tensor):
    """Its memory, as an array that does not keep it."""
    dtype = np.dtype(tensor.__cuda_array_interface__["typestr"])
    memory = (ctypes.c_char * (int(np.prod(tensor.shape)) * dtype.itemsize)).from_address(tensor.address)
    return np.ndarray(tensor.shape, dtype, memory)


class Gate:
    """Work of a stream that lasts until open."""

    def __init__(self, driver, stream):
        self._event = threading.Event()
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self._event.wait() and None)
        assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream), self._run, None) == 0
        self.open = self._event.set


class DeviceTensorsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.driver = driver = ctypes.CDLL("libcuda.so.1")
        driver.fake_cuda_set_gpus(1, b"fake GPU 0".ljust(16, b"\0"))
        assert driver.cuInit(0) == 0
        cls.context = ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(cls.context), 0) == 0
        assert driver.cuCtxPushCurrent_v2(cls.context) == 0

    def setUp(self):
        self.rng = np.random.default_rng(harness.SEED)
        self.server = self.enterContext(harness.Server(*FLAGS, local=True))
        self.before = self.alive()
        self.stream = self.new_stream()

    def new_stream(self):
        stream = ctypes.c_void_p()
        self.assertEqual(self.driver.cuStreamCreate(ctypes.byref(stream), 1), 0)
        self.addCleanup(self.driver.cuStreamDestroy_v2, stream)
        return stream.value

    def alive(self):
        return {kind: self.driver.fake_cuda_alive(kind.encode()) for kind in KINDS}

    def finish(self):
        self.assertEqual(self.driver.cuStreamSynchronize(ctypes.c_void_p(self.stream)), 0)

    def connect(self):
        return flashcore.connect(f"local:{self.server.local}")

    def arrays(self, count, *heads):
        return [self.rng.standard_normal((count, heads, DIM)).astype(np.float16) for heads in heads]

    def test_steps_of_many_layers_are_submitted_ahead(self):
        steps = 5
        with self.connect() as client, client.create_sequence(LAYERS, KV_HEADS, DIM) as sequence:
            gate = Gate(self.driver, self.stream)
            q, k, v = self.arrays(steps, HEADS, KV_HEADS, KV_HEADS)
            outputs = []
            for step in range(steps):
                tensors = [Tensor(array[step:step + 1], self.stream) for array in (q, k, v)]
                outputs += [sequence.attend(layer, *tensors, return_lse=True) for layer in range(LAYERS)]
            self.assertFalse(any(content(o).any() for o, _ in outputs), "the stream has not begun")
            gate.open()
            self.finish()
            for i, (o, lse) in enumerate(outputs):
                end = i // LAYERS + 1
                expected = reference(q[end - 1], k[:end], v[:end])
                self.assertLess(np.abs(content(o)[0] - expected).max(), 2e-3)
                self.assertTrue(np.isfinite(content(lse)).all())
            client.synchronize()
            self.assertEqual(sequence.info().layer_lengths, [steps] * LAYERS)

    def test_results_are_inputs_in_place(self):
        with self.connect() as client:
            k, v = (Tensor(array, self.stream) for array in self.arrays(10, KV_HEADS, KV_HEADS))
            q = client.device_empty((1, HEADS, DIM), stream=self.stream)
            content(q)[:], = expected, = self.arrays(1, HEADS)
            for _ in range(70):  # more than the ring has slots
                q = client.attend(q, k, v)
                expected = reference(expected[0], k.array, v.array)[None].astype(np.float16)
            self.finish()
            self.assertLess(np.abs(content(q) - expected).max(), 4e-3)
            client.synchronize()

    def test_an_error_comes_later_and_stops_no_stream(self):
        with self.connect() as client:
            sequence = client.create_sequence(LAYERS, KV_HEADS, DIM)
            tensors = [Tensor(array, self.stream) for array in self.arrays(1, HEADS, KV_HEADS, KV_HEADS)]
            with self.connect() as other:
                other.open_sequence(sequence.id).delete()
            sequence.attend(0, *tensors)
            self.finish()
            with self.assertRaisesRegex(flashcore.SequenceLost, "an earlier request"):
                client.synchronize()
            self.assertEqual(sequence.lengths, [0, 0])
            client.attend(*tensors)
            client.synchronize()

    def test_memory_is_not_written_before_its_stream_has_used_it(self):
        with self.connect() as client:
            gate = Gate(self.driver, self.stream)
            wanted = []
            for _ in range(20):  # each input is copied into the memory of the one before it
                q, k, v = self.arrays(3, HEADS, KV_HEADS, KV_HEADS)
                o = client.attend(*(Tensor(array, self.stream) for array in (q, k, v)))
                wanted.append((q, k, v, o))
            gate.open()
            self.finish()
            for q, k, v, o in wanted:
                for row in range(3):
                    self.assertLess(np.abs(content(o)[row] - reference(q[row], k, v)).max(), 2e-3)

    def test_nothing_is_left_after_a_close_with_requests_in_flight(self):
        client = self.connect()
        gate = Gate(self.driver, self.stream)
        tensors = [Tensor(array, self.stream) for array in self.arrays(1, HEADS, KV_HEADS, KV_HEADS)]
        outputs = [client.attend(*tensors) for _ in range(10)]
        self.assertGreater(self.server.metric("flashcore_device_tensor_bytes"), 0)
        client.close()
        content(outputs[0])[:] = 1  # it is mapped still
        gate.open()
        del outputs, client
        gc.collect()
        self.assertEqual(self.alive(), self.before)
        harness.wait_until(lambda: self.server.metric("flashcore_device_tensor_bytes") == 0,
                           "the memory is free")

    def test_full_memory_is_given_back(self):
        with self.connect() as client:
            for stream in (self.stream, self.new_stream(), self.new_stream()):  # more than fits together
                tensor = client.device_empty((10 << 20,), stream=stream)
                del tensor

    def test_a_thread_without_a_context(self):
        tensors = [Tensor(array, self.stream) for array in self.arrays(1, HEADS, KV_HEADS, KV_HEADS)]
        with self.connect() as client:
            outputs = []
            thread = threading.Thread(target=lambda: outputs.append(client.attend(*tensors)))
            thread.start()
            thread.join()
            client.synchronize()
            expected = reference(tensors[0].array[0], tensors[1].array, tensors[2].array)
            self.assertLess(np.abs(content(outputs[0])[0] - expected).max(), 2e-3)

    def test_a_step_of_more_sequences_than_a_slot_holds(self):
        count = 700
        with self.connect() as client, client.create_sequences(count, 1, KV_HEADS, DIM) as batch:
            q, k, v = self.arrays(count, HEADS, KV_HEADS, KV_HEADS)
            o = client.attend_batch(batch, 0, *(Tensor(array, self.stream) for array in (q, k, v)))
            client.synchronize()
            for i in (0, count // 2, count - 1):
                self.assertLess(np.abs(content(o)[i] - reference(q[i], k[i:i + 1], v[i:i + 1])).max(), 2e-3)
            self.assertEqual([info.layer_lengths for info in batch.info()], [[1]] * count)

    def test_a_server_that_shares_no_gpu(self):
        with harness.Server(local=True) as server, flashcore.connect(f"local:{server.local}") as client:
            with self.assertRaisesRegex(flashcore.Unimplemented, "--local_device_tensors"):
                client.device_empty((1,))


if __name__ == "__main__":
    harness.main()
