"""The Python client's local transport over a fake C library, without a server."""

import asyncio
import ctypes
import math
import os
import threading
import unittest
from unittest import mock

import flashcore
import numpy as np
from flashcore import _c_library, _local, _local_connection, _messages, aio
from flashcore._transport import Config, Retry

DIM = 32
ATTEND = _messages.METHODS["Attend"]
UNAVAILABLE = 14
RESOURCE_EXHAUSTED = 8


class FakeLibrary:
    """The functions of the C library to one server, whose O is V. `held`: it answers no attention until
    answer(). `down`: connections end, and no new ones come."""

    def __init__(self):
        self.held = self.down = False
        self.slots = 64
        self.connections = 0
        self.regions = {}  # id -> memory
        self.requests = []  # (connection, tag, request) without an answer
        self.answers = []
        self.cancelled = []
        self.changed = threading.Condition()
        self.error = b""

    # The C interface. A handle is the number of its connection.

    def connect(self, target, name, options, handle):
        if self.down:
            return self.fail(UNAVAILABLE, "Connection refused")
        self.connections, self.spin_us = self.connections + 1, options.spin_us
        handle._obj.value = self.connections
        self.ended_connections = set()
        return 0

    def fail(self, code, message):
        self.error = _messages.message("Status")(code=code, message=message).SerializeToString()
        return code

    def close(self, handle):
        pass

    def shutdown(self, handle):
        self.stop(1, "shut down")

    def ended(self, handle):
        return int(self.down)

    def last_status(self, size):
        size.value = len(self.error)
        self.buffer = ctypes.create_string_buffer(self.error, len(self.error))
        return ctypes.addressof(self.buffer)

    def register_memory(self, handle, size, read_only, timeout, memory):
        region, number = ctypes.create_string_buffer(size), len(self.regions) + 1
        memory.data, memory.bytes = ctypes.addressof(region), size
        ctypes.memmove(ctypes.addressof(memory) + 16, number.to_bytes(16, "little"), 16)
        self.regions[number.to_bytes(16, "little")] = region
        return 0

    def unregister_memory(self, handle, region_id):
        self.regions[region_id] = None
        return 0

    def submit(self, handle, tag, request, size, timeout):
        with self.changed:
            if self.down:
                return self.fail(UNAVAILABLE, "the server ended the connection")
            if len(self.requests) + len(self.answers) >= self.slots:
                return _c_library.AGAIN
            self.requests.append((tag, ATTEND[0].FromString(request[:size])))
            self.changed.notify_all()
        if not self.held:
            self.answer()
        return 0

    def wait(self, handle, nanoseconds, completion):
        with self.changed:
            self.changed.wait_for(lambda: self.answers or self.down, nanoseconds / 1e9)
            return self.poll(handle, completion)

    def poll(self, handle, completion):
        with self.changed:
            if self.answers:
                completion.tag, self.reply = self.answers.pop(0)
                completion.response = ctypes.cast(ctypes.c_char_p(self.reply), ctypes.c_void_p).value
                completion.response_bytes = len(self.reply)
                os.eventfd_read(self.fd) if not self.answers and hasattr(self, "fd") else None
                return 0
            return self.fail(UNAVAILABLE, "the server ended the connection") if self.down else -1

    def event_fd(self, handle, fd):
        self.fd = fd.value = os.eventfd(0)
        return 0

    def cancel(self, handle, tag):
        self.cancelled.append(tag)
        return 0

    # The server.

    def place(self, memory_range):
        region = self.regions[memory_range.region_id]
        return np.frombuffer(region, np.uint8, memory_range.bytes, memory_range.offset)

    def answer(self, status=None):
        """Answers all requests."""
        with self.changed:
            for tag, request in self.requests:
                reply = ATTEND[1]()
                if status is not None:
                    reply.status.code, reply.status.message = status
                else:
                    self.place(request.output_range)[:] = self.place(request.value_range)
                self.answers.append((tag, reply.SerializeToString()))
            self.requests.clear()
            self.changed.notify_all()
            if hasattr(self, "fd"):
                os.eventfd_write(self.fd, 1)

    def stop(self, code=UNAVAILABLE, message="the server ended the connection"):
        with self.changed:
            self.down = True
            self.changed.notify_all()


class LocalTransportTest(unittest.TestCase):
    def setUp(self):
        self.library = FakeLibrary()
        patch = mock.patch.object(_c_library, "load", lambda: self.library)
        patch.start()
        self.addCleanup(patch.stop)

    def config(self, **options):
        return Config.read("local:/a", None, None, options.get("timeout", 30.0), None,
                           options.get("retry", Retry(attempts=1)), {})

    def client(self, **options):
        config = self.config(**options)
        return flashcore.Client(aio.Client(config, _local.LocalTransport(config)))

    def tensors(self, rows=2, seed=1):
        return [np.random.default_rng(seed + i).standard_normal((rows, 1, DIM)).astype(np.float16)
                for i in range(3)]

    def in_flight(self, count):
        with self.library.changed:
            self.assertTrue(self.library.changed.wait_for(lambda: len(self.library.requests) == count, 60))

    def thread(self, call, *args, **options):
        """Starts a call. Returns what waits for it and returns its result or its error."""
        results = []

        def run():
            try:
                results.append(call(*args, **options))
            except flashcore.Error as error:
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()

        def join():
            thread.join(60)
            return results[0]
        return join

    def test_tensors_of_any_strides_lie_in_shared_memory_with_their_lengths(self):
        client, (q, k, v) = self.client(), self.tensors(4)
        np.testing.assert_array_equal(client.attend(q, k, v), v)
        self.library.held = True
        join = self.thread(client.attend, q[::-1], k[:, :, ::-1], v[::-1])
        self.in_flight(1)
        _, request = self.library.requests[0]
        self.assertEqual((request.query, request.key, request.value), (b"", b"", b""))
        for place, tensor in ((request.query_range, q[::-1]), (request.key_range, k[:, :, ::-1]),
                              (request.value_range, v[::-1])):
            self.assertEqual((place.bytes, place.offset % 16), (tensor.nbytes, 0))
            self.assertEqual(self.library.place(place).tobytes(), tensor.tobytes())
        self.library.answer()
        np.testing.assert_array_equal(join(), v[::-1])

    def test_memory_is_reused(self):
        client, (q, k, v) = self.client(), self.tensors()
        for _ in range(100):
            client.attend(q, k, v)
        self.assertEqual(len(self.library.regions), 1)

    def test_large_memory_is_reused_however_often(self):
        client, tensors = self.client(), self.tensors(5000)
        with mock.patch.object(_local_connection, "_MOST_IDLE_BYTES", 4 << 20):  # of few such blocks
            for _ in range(10):
                client.attend(*tensors)
        self.assertEqual(len(self.library.regions), 1)

    def test_unused_memory_is_given_back_at_the_quota(self):
        client, larger = self.client(), self.tensors(9000)
        client.attend(*self.tensors(5000))
        register = self.library.register_memory

        def with_quota(*args):
            if any(self.library.regions.values()):
                return self.library.fail(RESOURCE_EXHAUSTED, "the quota is used up")
            return register(*args)

        self.library.register_memory = with_quota
        np.testing.assert_array_equal(client.attend(*larger), larger[2])

    def test_threads_get_their_own_answers(self):
        client = self.client()
        self.library.held = True
        wanted = [self.tensors(seed=seed) for seed in range(0, 90, 3)]
        joins = [self.thread(client.attend, *tensors) for tensors in wanted]
        self.in_flight(len(joins))
        self.library.answer()
        for join, (_, _, v) in zip(joins, wanted):
            np.testing.assert_array_equal(join(), v)

    def test_a_full_ring_is_waited_for(self):
        self.library.held, self.library.slots = True, 2
        client = self.client()
        wanted = [self.tensors(seed=seed) for seed in range(0, 21, 3)]
        joins = [self.thread(client.attend, *tensors) for tensors in wanted]
        self.in_flight(2)
        self.library.held = False
        self.library.answer()
        for join, (_, _, v) in zip(joins, wanted):
            np.testing.assert_array_equal(join(), v)

    def test_memory_of_a_late_call_is_reused_only_after_its_answer(self):
        client, (q, k, v) = self.client(), self.tensors()
        self.library.held = True
        with self.assertRaises(TimeoutError):
            client.attend(q, k, v, timeout=1e-6 + 0.01)
        (tag, late), = self.library.requests
        self.assertEqual(self.library.cancelled, [tag])
        join = self.thread(client.attend, q, k, v)
        self.in_flight(2)
        other = self.library.requests[1][1]
        self.assertNotEqual(other.query_range, late.query_range)
        self.library.answer()
        np.testing.assert_array_equal(join(), v)
        join = [self.thread(client.attend, q, k, v) for _ in range(2)]
        self.in_flight(2)
        used = {request.query_range.offset for _, request in self.library.requests}
        self.assertEqual(used, {late.query_range.offset, other.query_range.offset})
        self.library.answer()
        [each() for each in join]

    def test_the_servers_error(self):
        client = self.client()
        self.library.held = True
        join = self.thread(client.attend, *self.tensors())
        self.in_flight(1)
        self.library.answer((8, "the queue is full"))
        self.assertIsInstance(join(), flashcore.ResourceExhausted)

    def test_the_end_of_the_connection_is_unavailable_and_a_new_one_is_made(self):
        client, tensors = self.client(), self.tensors()
        self.library.held = True
        joins = [self.thread(client.attend, *tensors) for _ in range(3)]
        self.in_flight(3)
        self.library.stop()
        for join in joins:
            error = join()
            self.assertIsInstance(error, flashcore.Unavailable)
            self.assertFalse(error.never_sent)
        with self.assertRaises(flashcore.Unavailable) as caught:
            client.attend(*tensors)
        self.assertTrue(caught.exception.never_sent)
        self.library.down = self.library.held = False
        self.library.requests.clear()
        np.testing.assert_array_equal(client.attend(*tensors), tensors[2])
        self.assertEqual(self.library.connections, 2)

    def test_a_closed_client(self):
        client = self.client()
        client.attend(*self.tensors())
        client.close()
        with self.assertRaisesRegex(flashcore.FailedPrecondition, "closed"):
            client.attend(*self.tensors())

    def test_only_a_blocking_call_spins(self):
        async def run():
            config = self.config()
            async with aio.Client(config, _local.AsyncLocalTransport(config)) as client:
                await client.attend(*self.tensors())

        self.client().attend(*self.tensors())
        self.assertGreater(self.library.spin_us, 0)
        asyncio.run(run())
        self.assertEqual(self.library.spin_us, 0)

    def test_asyncio_cancelled_tasks_keep_their_memory_until_the_answer(self):
        async def run():
            config = self.config()
            async with aio.Client(config, _local.AsyncLocalTransport(config)) as client:
                q, k, v = self.tensors()
                np.testing.assert_array_equal(await client.attend(q, k, v), v)
                self.library.held = True
                tasks = [asyncio.ensure_future(client.attend(q, k, v)) for _ in range(3)]
                while len(self.library.requests) < 3:
                    await asyncio.sleep(0)
                tasks[0].cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await tasks[0]
                self.assertEqual(len(self.library.cancelled), 1)
                tasks[0] = asyncio.ensure_future(client.attend(q, k, v))
                while len(self.library.requests) < 4:
                    await asyncio.sleep(0)
                places = {request.query_range.offset for _, request in self.library.requests}
                self.assertEqual(len(places), 4)
                self.library.answer()
                for o in await asyncio.gather(*tasks):
                    np.testing.assert_array_equal(o, v)
                with self.assertRaises(TimeoutError):
                    await client.attend(q, k, v, timeout=0.01)

        asyncio.run(run())

    def test_asyncio_a_cancelled_task_passes_its_turn_on(self):
        async def run():
            config = self.config(timeout=math.inf)
            transport = _local.AsyncLocalTransport(config)
            async with aio.Client(config, transport) as client:
                q, k, v = self.tensors()
                await client.attend(q, k, v)
                self.library.held, self.library.slots = True, 1
                tasks = [asyncio.ensure_future(client.attend(q, k, v)) for _ in range(4)]
                while len(transport._connection._turns) < 3:
                    await asyncio.sleep(0)
                tasks[2].cancel()  # has no turn yet
                await asyncio.wait(tasks[2:3])
                self.library.answer()
                transport._take(transport._connection)  # gives the next task its turn
                tasks[1].cancel()
                for place in (0, 3):
                    while not self.library.requests and not tasks[place].done():
                        await asyncio.sleep(0)
                    self.library.answer()
                    np.testing.assert_array_equal(await tasks[place], v)
                self.assertEqual([task.cancelled() for task in tasks], [False, True, True, False])

        asyncio.run(asyncio.wait_for(run(), 50))  # ends a hang

    def test_asyncio_calls_see_the_end_of_their_connection(self):
        async def run():
            config = self.config()
            async with aio.Client(config, _local.AsyncLocalTransport(config)) as client:
                await client.attend(*self.tensors())
                self.library.held = True
                tasks = [asyncio.ensure_future(client.attend(*self.tensors())) for _ in range(2)]
                while len(self.library.requests) < 2:
                    await asyncio.sleep(0)
                self.library.stop()
                with self.assertRaises(flashcore.Unavailable) as caught:
                    await client.attend(*self.tensors())
                self.assertTrue(caught.exception.never_sent)
                for task in tasks:
                    with self.assertRaises(flashcore.Unavailable) as caught:
                        await task
                    self.assertFalse(caught.exception.never_sent)

        asyncio.run(run())

    def test_a_task_that_is_cancelled_while_memory_is_registered_loses_none(self):
        async def run():
            config, registering = self.config(), threading.Event()
            register, go_on = self.library.register_memory, threading.Event()

            def slow(*args):
                registering.set()
                go_on.wait(60)
                return register(*args)

            self.library.register_memory = slow
            async with aio.Client(config, _local.AsyncLocalTransport(config)) as client:
                task = asyncio.ensure_future(client.attend(*self.tensors(5000)))
                while not registering.is_set():
                    await asyncio.sleep(0)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                go_on.set()
                await client.attend(*self.tensors(5000))
                self.assertEqual(len(self.library.regions), 1)

        asyncio.run(run())


class CLibraryTest(unittest.TestCase):
    def test_without_it_connect_says_what_to_install(self):
        _c_library.load.cache_clear()
        self.addCleanup(_c_library.load.cache_clear)
        with mock.patch.dict(os.environ, {"FLASHCORE_C_LIBRARY": "/nonexistent/libflashcore_c.so"}):
            for connect in (flashcore.connect, flashcore.aio.connect):
                with self.assertRaises(flashcore.Unimplemented) as caught:
                    connect("local:/run/flashcore.sock")
                self.assertIn("install CMake and a C++ compiler", str(caught.exception))
                self.assertIn("/nonexistent/libflashcore_c.so", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
