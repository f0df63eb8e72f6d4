"""--accumulate sets the type of the kernels' sums, or the server does not start."""

import unittest

import harness
from flashcore.v1 import attention_pb2 as pb


class AccumulateTest(unittest.TestCase):
    def test_sums_in_float32_by_default_and_in_what_it_is_told(self):
        told = ("float32", "float16") if harness.ON_GPU else ("float32",)
        for want, flags in (("float32", ()), *((a, (f"--accumulate={a}",)) for a in told)):
            with self.subTest(flags), harness.Server(*flags) as server, \
                    server.channel() as channel:
                info = harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest())
                self.assertEqual({kernel.accumulate for kernel in info.kernels}, {want})
                self.assertEqual(server.wait_for_record("device")["accumulate"], want)
                harness.cli("verify", f"--target={server.target}", "--cases=5",
                            f"--seed={harness.SEED}")

    def test_the_cpu_cannot_sum_in_float16(self):
        status, said = harness.refusal("--device=cpu", "--accumulate=float16")
        self.assertEqual(status, 1)
        self.assertIn("no kernels for cpu: accumulate float16 is not float32", said)

    def test_another_type_is_a_bad_flag(self):
        status, said = harness.refusal("--accumulate=fp16")
        self.assertEqual(status, 2)
        self.assertIn("--accumulate: 'fp16' is not float32 or float16", said)


if __name__ == "__main__":
    harness.main()
