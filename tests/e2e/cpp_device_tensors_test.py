"""Tensors on the GPU in the C++ client, with a real server. On a fake GPU, libcuda.so.1 is
tests/client/fake_cuda: ctest puts it first in LD_LIBRARY_PATH."""

import os
import subprocess
import unittest

import harness

FLAGS = ("--local_device_tensors", "--device_tensor_bytes=64MiB")
CLIENT = os.environ["FLASHCORE_DEVICE_CLIENT"]


class CppDeviceTensorsTest(unittest.TestCase):
    def run_client(self, *flags):
        with harness.Server(*flags, local=True) as server:
            return subprocess.run([CLIENT, f"local:{server.local}"], capture_output=True, text=True,
                                  timeout=300)

    def test_a_decode_on_a_cuda_stream_is_that_of_host_tensors(self):
        done = self.run_client(*FLAGS)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "150 requests are the same to the bit\n")

    def test_a_server_without_device_tensors_says_so(self):
        done = self.run_client()
        self.assertEqual(done.returncode, 1)
        self.assertIn("AllocateDeviceMemory: UNIMPLEMENTED", done.stderr)
        self.assertIn("--local_device_tensors", done.stderr)

    def test_the_quota_is_told(self):
        done = self.run_client(FLAGS[0], "--device_tensor_bytes=4MiB")  # a client gets half
        self.assertEqual(done.returncode, 1)
        self.assertIn("AllocateDeviceMemory: RESOURCE_EXHAUSTED", done.stderr)


if __name__ == "__main__":
    harness.main()
