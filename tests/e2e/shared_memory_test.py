"""Shared memory between processes: a client that is killed, and the command line."""

import os
import queue
import random
import signal
import subprocess
import time
import unittest

import grpc
import harness
import numpy as np
from flashcore.v1 import attention_pb2 as pb
from harness import wait_until

FLAGS = ("--allow_shared_memory",)


def segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith("flashcore-")}


class SharedMemoryTest(unittest.TestCase):
    def bench(self, server, *flags):
        return [harness.CLI, "bench", f"--target=unix:{server.socket}", "--transport=shm",
                "--shape=1x8x128x64", *flags]

    def test_bench_sends_next_to_nothing(self):
        with harness.Server(*FLAGS) as server:
            report = harness.bench(*self.bench(server)[2:])
            self.assertEqual((report["failed"], report["wrong_replies"]), (0, 0))
            self.assertEqual(report["transport"], "shm")
            self.assertLess(report["request_bytes"], 300)

    def test_a_client_that_is_killed_leaves_nothing(self):
        with harness.Server(*FLAGS) as server:
            before = segments()
            for _ in range(2):
                client = subprocess.Popen(
                    self.bench(server, "--concurrency=4", "--duration=1h"),
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                handled = 'grpc_server_started_total{grpc_type="unary",' \
                          'grpc_service="flashcore.v1.AttentionService",grpc_method="Attend"}'
                start = server.metric(handled)
                wait_until(lambda: server.metric(handled) > start + 20, "no load")
                wait_until(lambda: server.metric("flashcore_shared_memory_regions") == 4,
                           "each worker has a region")
                client.send_signal(signal.SIGKILL)
                client.wait()
                for what in ("bytes", "regions"):
                    wait_until(lambda: server.metric(f"flashcore_shared_memory_{what}") == 0,
                               "the memory is released")
            # Those of other processes have a name only while they are registered.
            left = segments() - before
            wait_until(lambda: not left & segments(), lambda: f"{left} are left")
            with server.channel() as channel:
                harness.stub(channel).Attend(harness.small_request())

    @harness.stress
    def test_clients_killed_at_any_moment_leave_next_to_nothing(self):
        held = "flashcore-held-"
        random_ = random.Random(harness.SEED)
        with harness.Server(*FLAGS) as server:
            for _ in range(40):
                client = subprocess.Popen(
                    self.bench(server, "--concurrency=4", "--duration=1h"),
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                time.sleep(random_.uniform(0, 0.15))
                client.kill()
                client.wait()
            left = [name for name in os.listdir("/dev/shm") if name.startswith(held)]
            print(f"{len(left)} segments left by 40 killed clients", flush=True)
            self.assertLess(len(left), 10)
            # The next client removes what they left.
            subprocess.run(self.bench(server, "--duration=10ms", "--warmup=0s"), check=True,
                           stdout=subprocess.DEVNULL)
            self.assertEqual({name for name in os.listdir("/dev/shm")
                              if name.startswith(held)} & set(left), set())
            wait_until(lambda: server.metric("flashcore_shared_memory_bytes") == 0,
                       "the memory is released")

    def test_any_language(self):
        """The handshake and a request of the generated client."""
        rng = harness.numpy_rng()
        q, k, v = (harness.random_tensor(rng, 4, 2, 32) for _ in range(3))
        name = f"flashcore-test-{os.getpid()}"
        path = f"/dev/shm/{name}"
        np.zeros(8192, np.uint8).tofile(path)
        try:
            memory = np.memmap(path, np.uint8, "r+")
            with harness.Server(*FLAGS) as server, \
                    server.channel(f"unix:{server.socket}") as channel:
                self.round_trip(harness.stub(channel), name, memory, q, k, v)
                wait_until(lambda: server.metric("flashcore_shared_memory_bytes") == 0,
                           "the memory is released")
        finally:
            os.unlink(path)

    def round_trip(self, stub, name, memory, q, k, v):
        to_send = queue.SimpleQueue()
        answers = stub.RegisterMemory(iter(to_send.get, None))
        to_send.put(pb.RegisterMemoryRequest(name=f"/{name}", bytes=memory.size))
        memory[:16] = np.frombuffer(next(answers).challenge, np.uint8)
        to_send.put(pb.RegisterMemoryRequest())
        region_id = next(answers).region_id

        request = harness.request(q, k, v)
        for number, tensor in enumerate(("query", "key", "value")):
            data = np.frombuffer(getattr(request, tensor), np.uint8)
            memory[1024 * number:][:data.size] = data
            request.ClearField(tensor)
            getattr(request, f"{tensor}_range").CopyFrom(
                pb.MemoryRange(region_id=region_id, offset=1024 * number))
        request.output_range.CopyFrom(pb.MemoryRange(region_id=region_id, offset=4096))
        response = stub.Attend(request)
        self.assertEqual(response.output, b"")
        output = memory[4096:4096 + q.nbytes].view(np.float16).reshape(q.shape)
        np.testing.assert_allclose(output, harness.reference(q, k, v)[0], atol=2e-3)

        to_send.put(None)
        self.assertEqual(list(answers), [])
        with self.assertRaises(grpc.RpcError) as error:
            stub.Attend(request)
        self.assertEqual(error.exception.code(), grpc.StatusCode.NOT_FOUND)


if __name__ == "__main__":
    harness.main()
