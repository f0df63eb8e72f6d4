"""A device is lost under load: requests fail, health turns to NOT_SERVING, the process exits."""

import signal
import threading
import time
import unittest

import grpc
import numpy as np

import harness

OK, INTERNAL, UNAVAILABLE = (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL,
                             grpc.StatusCode.UNAVAILABLE)


class DeviceLostTest(unittest.TestCase):
    def test_requests_fail_health_turns_and_the_process_exits_with_an_error(self):
        codes = []

        def load(target):
            """Sends requests until the server is gone."""
            with server.channel(target) as channel:
                request = harness.mission_request(np.random.default_rng(1))
                while not codes or codes[-1] != UNAVAILABLE:
                    codes.append(harness.stub(channel).Attend.future(request, timeout=60).code())

        with harness.Server(program=harness.LOSING_SERVER) as server, server.channel() as channel:
            health = harness.watch_health(channel)
            self.assertEqual(next(health), "SERVING")
            clients = [threading.Thread(target=load, args=(server.target,)) for _ in range(4)]
            for client in clients:
                client.start()
            while codes.count(OK) < 10:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGUSR1)
            self.assertEqual(next(health), "NOT_SERVING")
            for client in clients:
                client.join(60)
            self.assertEqual(server.process.wait(60), 1)
            self.assertEqual(set(codes), {OK, INTERNAL, UNAVAILABLE})
            lost = server.wait_for_record("the device is lost")
            self.assertIn("cuda:0", lost["device"])


if __name__ == "__main__":
    unittest.main()
