"""Tensors in memory of the GPU that client and server share, in the order of counters, by a client written
from the documentation alone. On a fake GPU its memory is a memfd, and the client plays the CUDA stream.

    device_tensors_test.py SOCKET   decodes until it is killed
"""

import mmap
import os
import signal
import subprocess
import sys
import unittest

import harness
import numpy as np
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import local_pb2 as local
from harness import wait_until
from local_raw_client import RawClient, reference

FLAGS = ("--local_device_tensors", "--device_tensor_bytes=64MiB")
HEADS, KV_HEADS, DIM = 4, 2, 64
LSE_BYTES = HEADS * 4
INPUTS, RESULTS = 512 * 1024, 512 * 1024 + 64  # counters in the client's host memory
STRIDE = 4096  # between tensors
STEP = 5 * STRIDE  # between steps
NAMES = ("query", "key", "value", "output", "lse")


class DeviceClient(RawClient):
    """With a region of device memory, of which it maps what CUDA would."""

    def __init__(self, path, size=2 << 20):
        super().__init__(path)
        reply = self.exchange(
            allocate_device_memory=local.LocalAllocateDeviceMemory(bytes=size, device_id="cuda:0"))
        self.device = reply.allocate_device_memory
        fd = self.received_fds.pop()
        self.device_memory = mmap.mmap(fd, self.device.bytes)
        os.close(fd)
        self.value = 0

    def create(self):
        request = pb.CreateSequenceRequest(
            num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=pb.DTYPE_FLOAT16)
        return self.call("CreateSequence", request, pb.CreateSequenceResponse).sequence_id

    def offset(self, step, name):
        return step * STEP + NAMES.index(name) * STRIDE

    def place(self, step, name, size):
        return pb.MemoryRange(region_id=self.device.region_id, offset=self.offset(step, name), bytes=size)

    def array(self, step, name, dtype, shape):
        at = self.offset(step, name)
        return np.frombuffer(self.device_memory, dtype, np.prod(shape), at).reshape(shape)

    def submit_step(self, step, sequence_id):
        """Appends a row and attends, once the counter of the inputs has the next value."""
        self.value += 1
        point = dict(region_id=self.region_id, value=self.value)
        q_bytes, kv_bytes = HEADS * DIM * 2, KV_HEADS * DIM * 2
        self.submit(step, pb.AttendRequest(
            dtype=pb.DTYPE_FLOAT16, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
            layout=pb.LAYOUT_NHD, return_lse=True,
            spans=[pb.Span(query_rows=1, kv_rows=1, sequence_id=sequence_id)],
            query_range=self.place(step, "query", q_bytes), key_range=self.place(step, "key", kv_bytes),
            value_range=self.place(step, "value", kv_bytes),
            output_range=self.place(step, "output", q_bytes), lse_range=self.place(step, "lse", LSE_BYTES),
            inputs_ready=pb.TimelinePoint(offset=INPUTS, **point),
            results_ready=pb.TimelinePoint(offset=RESULTS, **point)))

    def write_inputs(self, step, q, k, v):
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            self.array(step, name, np.float16, tensor.shape)[...] = tensor

    def await_results(self, value):
        wait_until(lambda: self.counter(RESULTS) >= value,
                   lambda: f"results of {value}: {self.counter(RESULTS)}")


def decode_until_killed(path):
    client = DeviceClient(path)
    sequence_id = client.create()
    print("decodes", flush=True)
    while True:
        client.submit_step(0, sequence_id)
        client.store(INPUTS, client.value)
        client.receive()


class DeviceTensorsTest(unittest.TestCase):
    def test_steps_submitted_ahead_run_in_the_order_of_their_inputs(self):
        rng = np.random.default_rng(harness.SEED)
        with harness.Server(*FLAGS, local=True) as server:
            client = DeviceClient(server.local)
            self.assertEqual(len(client.device.device_uuid), 16)
            sequence_id = client.create()
            steps = 4  # as many as the ring has slots
            q = rng.standard_normal((steps, HEADS, DIM)).astype(np.float16)
            k, v = (rng.standard_normal((steps, KV_HEADS, DIM)).astype(np.float16) for _ in range(2))
            for step in range(steps):
                client.submit_step(step, sequence_id)
            for step in range(steps):
                self.assertEqual(client.counter(RESULTS), step, "it waits for its inputs")
                client.write_inputs(step, q[step], k[step], v[step])
                client.store(INPUTS, step + 1)
                client.await_results(step + 1)
                output = client.array(step, "output", np.float16, (HEADS, DIM))
                self.assertLess(np.abs(output - reference(q[step], k[:step + 1], v[:step + 1])).max(), 2e-3)
                self.assertTrue(np.isfinite(client.array(step, "lse", np.float32, (HEADS,))).all())
            for step in range(steps):
                tag, response = client.receive()
                self.assertEqual((tag, response.status.code), (step, 0), response)
                self.assertEqual(response.timing.staging_wait_ns, 0)

    def test_a_failure_is_seen_in_the_answer_and_stops_no_stream(self):
        with harness.Server(*FLAGS, local=True) as server:
            client = DeviceClient(server.local)
            client.submit_step(0, b"\0" * 16)
            _, response = client.receive()
            self.assertEqual(response.status.code, 5, response)  # NOT_FOUND
            self.assertEqual(client.counter(RESULTS), 0, "until the stream comes so far")
            client.store(INPUTS, 1)
            client.await_results(1)

    def kill_clients(self, times):
        with harness.Server(*FLAGS, local=True) as server:
            before = None
            for _ in range(times):
                client = subprocess.Popen([sys.executable, "-B", __file__, server.local],
                                          stdout=subprocess.PIPE, text=True)
                self.assertIn("decodes\n", iter(client.stdout.readline, ""))
                self.assertGreater(server.metric("flashcore_device_tensor_bytes"), 0)
                client.send_signal(signal.SIGKILL)
                client.communicate()
                wait_until(lambda: server.metric("flashcore_device_tensor_bytes") == 0, "the memory is free")
                wait_until(lambda: before is None or server.open_files() <= before,
                           "the files are closed")
                before = server.open_files()
            DeviceClient(server.local)

    def test_a_client_that_is_killed_leaves_nothing(self):
        self.kill_clients(3)

    @harness.stress
    def test_many_clients_that_are_killed_leave_nothing(self):
        self.kill_clients(200)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("/"):
        decode_until_killed(sys.argv[1])
    harness.main()
