"""Tensors on a GPU in the Python client, over a fake C library and a GPU that runs its streams when told to.

The fake GPU's memory is host memory, so arrays of numpy over it have its content.
"""

import asyncio
import collections
import ctypes
import threading
import unittest
from unittest import mock

import flashcore
import numpy as np
import python_local_test as fakes
from flashcore import _c_library, _device_memory, _device_tensors, _local, _messages, aio
from flashcore._transport import Config, Retry

HEADS, DIM = 2, 32
RESOURCE_EXHAUSTED, NOT_FOUND, FAILED_PRECONDITION = 8, 5, 9
STREAM, OTHER = 0x1000, 0x2000


class FakeDriver:
    """libcuda.so.1. Streams are lists of what is to be done."""

    def __init__(self):
        self.streams = collections.defaultdict(collections.deque)
        self.copies = self.synchronized = 0
        self.context = 0x500  # current on this thread; 0: none

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal + 10
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 0x600 + device.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0

    def cuMemcpyDtoDAsync_v2(self, to, source, size, stream):
        self.copies += 1
        self.streams[stream.value or 0].append(lambda: ctypes.memmove(to.value, source.value, size.value))
        return 0

    def cuCtxSynchronize(self):
        self.synchronized += 1
        self.run()
        return 0

    def run(self):
        """All work of all streams."""
        for stream in self.streams.values():
            while stream:
                stream.popleft()()


class FakeGpuLibrary(fakes.FakeLibrary):
    """The C library to a server with a GPU, whose O is V, or Q without V, and whose LSE is 1. `status`:
    the code and message of the answers. `quota`: bytes of device memory."""

    def __init__(self, driver):
        super().__init__()
        self.driver, self.status, self.quota = driver, None, 1 << 40
        self.status_of = {}  # by tag
        self.device_regions, self.closed, self.called, self.in_flight = {}, [], [], 0

    def allocate_device_memory(self, handle, size, device_id, timeout, memory):
        if sum(len(region) for region in self.device_regions.values()) + size > self.quota:
            return self.fail(RESOURCE_EXHAUSTED, "no device memory is left")
        region, number = ctypes.create_string_buffer(size), 1000 + len(self.regions)
        region_id = number.to_bytes(16, "little")
        memory.address, memory.bytes, memory.ordinal = ctypes.addressof(region), size, 0
        memory.region_id[:] = region_id
        self.regions[region_id] = self.device_regions[region_id] = region
        return 0

    def unregister_memory(self, handle, region_id):
        self.device_regions.pop(region_id, None)
        return super().unregister_memory(handle, region_id)

    def submit_on_stream(self, handle, tag, request, size, timeout, stream):
        if self.down:
            return self.fail(fakes.UNAVAILABLE, "the server ended the connection")
        if size > 16384 - 70:
            return self.fail(RESOURCE_EXHAUSTED, f"request: {size} bytes, over those of a slot")
        if self.in_flight + len(self.answers) >= self.slots:
            return _c_library.AGAIN
        self.in_flight += 1
        message = fakes.ATTEND[0].FromString(request[:size])
        self.requests.append((tag, message))
        self.driver.streams[stream].append(lambda: self.run(tag, message))
        return 0

    def run(self, tag, request):
        reply = fakes.ATTEND[1]()
        status = self.status_of.get(tag, self.status)
        if status is not None:
            reply.status.code, reply.status.message = status
        else:
            source = request.value_range if request.HasField("value_range") else request.query_range
            self.place(request.output_range)[:] = self.place(source)
            if request.return_lse:
                self.place(request.lse_range).view(np.float32)[:] = 1
        self.in_flight -= 1
        self.answers.append((tag, reply.SerializeToString()))

    def wait(self, handle, nanoseconds, completion):
        if not self.answers and not self.held and not self.down:
            self.driver.run()  # time passes
        return self.poll(handle, completion)

    def call(self, handle, method, request, size, timeout, reply):
        method = method.decode()
        self.called.append((method, self.in_flight))
        message = _messages.METHODS[method][1]()
        if method == "CreateSequence":
            message.sequence.CopyFrom(_messages.message("SequenceInfo")(
                sequence_id=len(self.called).to_bytes(16, "little"), num_layers=2, num_kv_heads=HEADS,
                head_dim=DIM, dtype=1, device_id="cuda:0", layer_lengths=[0, 0]))
            message.sequence_id = message.sequence.sequence_id
        self.replied = message.SerializeToString()
        buffer = ctypes.create_string_buffer(self.replied, len(self.replied) + 1)
        self.reply_buffer = buffer
        reply.data, reply.size = ctypes.addressof(buffer), len(self.replied)
        return 0

    def free(self, reply):
        pass

    def close(self, handle):
        self.closed.append(handle.value)


class Foreign:
    """An array of another package on the GPU."""

    def __init__(self, array, stream=STREAM, **fields):
        self.array = array
        self.__cuda_array_interface__ = dict(
            shape=array.shape, typestr=array.dtype.str, data=(array.ctypes.data, False), version=3,
            stream=stream, strides=None if array.flags.c_contiguous else array.strides) | fields


def content(tensor):
    """An array over the memory of a tensor on the fake GPU; does not keep it."""
    interface = tensor.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    size = int(np.prod(tensor.shape)) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(interface["data"][0])
    return np.ndarray(tensor.shape, dtype, memory, 0, interface["strides"])


class DeviceTest(unittest.TestCase):
    def setUp(self):
        self.driver = FakeDriver()
        self.library = FakeGpuLibrary(self.driver)
        for module, name, value in ((_c_library, "load", lambda: self.library),
                                    (_device_tensors, "_driver", lambda: self.driver),
                                    (_device_tensors, "_thread", threading.local())):
            patch = mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        config = self.config()
        self.client = flashcore.Client(aio.Client(config, _local.LocalTransport(config)))

    def config(self, target="local:/a"):
        return Config.read(target, None, None, 30.0, None, Retry(attempts=1), {})

    def arrays(self, rows=3, seed=1):
        return [np.random.default_rng(seed + i).standard_normal((rows, HEADS, DIM)).astype(np.float16)
                for i in range(3)]

    def tensors(self, rows=3, seed=1, stream=STREAM):
        return [Foreign(array, stream) for array in self.arrays(rows, seed)]

    def empty(self, rows=3, stream=STREAM, dtype="float16"):
        return self.client.device_empty((rows, HEADS, DIM), dtype, stream=stream)

    # Results and order.

    def test_a_call_returns_before_the_stream_has_run(self):
        q, k, v = self.tensors()
        o, lse = self.client.attend(q, k, v, return_lse=True)
        self.assertEqual((o.shape, o.dtype, o.stream), ((3, HEADS, DIM), "float16", STREAM))
        self.assertEqual((lse.shape, lse.dtype, lse.stream), ((3, HEADS), "float32", STREAM))
        self.assertFalse(content(o).any(), "nothing has run yet")
        self.driver.run()
        np.testing.assert_array_equal(content(o), v.array)
        self.assertTrue((content(lse) == 1).all())
        self.assertEqual(self.driver.copies, 3)
        self.assertEqual(self.driver.synchronized, 0)
        self.client.synchronize()

    def test_inputs_in_the_clients_memory_are_used_in_place(self):
        q, k, v = self.empty(), self.empty(), self.empty()
        content(v)[:] = self.arrays()[2]
        o = self.client.attend(q, k, v)
        self.driver.run()
        self.assertEqual(self.driver.copies, 0)
        np.testing.assert_array_equal(content(o), content(v))
        request = self.library.requests[0][1]
        for tensor, place in ((q, request.query_range), (k, request.key_range), (v, request.value_range)):
            self.assertEqual(self.library.place(place).ctypes.data, tensor.address)

    def test_a_part_that_is_not_aligned_is_copied(self):
        q, k = self.empty(), self.empty()
        odd = Foreign(content(self.empty(4)).reshape(-1)[1:1 + 3 * HEADS * DIM].reshape(3, HEADS, DIM))
        self.client.attend(q, k, odd)
        self.assertEqual(self.driver.copies, 1)

    def test_calls_ahead_run_in_order_and_take_results_as_inputs(self):
        q, k, v = self.tensors()
        o = self.client.attend(q, k, v)
        for _ in range(10):
            o = self.client.attend(q, k, o)
        self.driver.run()
        np.testing.assert_array_equal(content(o), v.array)
        self.client.synchronize()

    def test_a_full_ring_is_waited_for(self):
        self.library.slots = 2
        q, k, v = self.tensors()
        results = [self.client.attend(q, k, v) for _ in range(7)]
        self.driver.run()
        for o in results:
            np.testing.assert_array_equal(content(o), v.array)

    def test_layout_hnd(self):
        arrays = [np.ascontiguousarray(array.swapaxes(0, 1)) for array in self.arrays(rows=1)]
        o, lse = self.client.attend(*map(Foreign, arrays), layout="HND", return_lse=True)
        self.driver.run()
        np.testing.assert_array_equal(content(o), arrays[2])
        self.assertEqual(lse.shape, (HEADS, 1))

    def test_bfloat16_is_its_bits(self):
        bits = [array.view(np.uint16) for array in self.arrays()]
        o = self.client.attend(*map(Foreign, bits), dtype="bfloat16")
        self.driver.run()
        self.assertEqual((o.dtype, self.library.requests[0][1].dtype), ("bfloat16", 2))
        np.testing.assert_array_equal(content(o), bits[2])

    # Errors.

    def test_an_error_is_raised_by_the_next_call_once(self):
        q, k, v = self.tensors()
        self.library.status = (NOT_FOUND, "no such region")
        self.client.attend(q, k, v)
        self.driver.run()
        self.library.status = None
        with self.assertRaisesRegex(flashcore.NotFound, "earlier request.*no such region"):
            self.client.attend(q, k, v)
        o = self.client.attend(q, k, v)
        self.client.synchronize()
        np.testing.assert_array_equal(content(o), v.array)

    def test_synchronize_waits_for_the_answers_and_counts_the_errors(self):
        self.library.status = (RESOURCE_EXHAUSTED, "the queue is full")
        for _ in range(3):
            self.client.attend(*self.tensors())
        with self.assertRaisesRegex(flashcore.ResourceExhausted, "the queue is full; 2 requests after it"):
            self.client.synchronize()
        self.client.synchronize()

    def test_synchronize_has_a_timeout(self):
        self.library.held = True
        self.client.attend(*self.tensors())
        with self.assertRaises(flashcore.DeadlineExceeded):
            self.client.synchronize(timeout=0.001)
        self.library.held = False
        self.client.synchronize()

    def test_a_thread_without_a_context_takes_the_primary_one_of_the_gpu(self):
        self.client.attend(*self.tensors())
        self.assertEqual(self.driver.context, 0x500, "it has one")
        self.driver.context = _device_tensors._thread.has_context = 0
        self.client.attend(*self.tensors())
        self.assertEqual(self.driver.context, 0x60A)

    def test_more_spans_than_a_slot_holds_are_several_requests(self):
        spans = 2000
        bounds = list(range(spans + 1))
        q, k, v = self.tensors(rows=spans)
        o, lse = self.client.attend(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True)
        self.driver.run()
        np.testing.assert_array_equal(content(o), v.array)
        self.assertTrue((content(lse) == 1).all())
        self.client.synchronize()
        requests = [request for _, request in self.library.requests]
        self.assertGreater(len(requests), 1)
        self.assertEqual(sum(len(request.spans) for request in requests), spans)

    def test_rows_of_a_part_that_failed_are_taken_back(self):
        sequences = [self.client.create_sequence(2, HEADS, DIM) for _ in range(700)]
        step = self.client.plan(sequences, num_heads=HEADS)
        tensors = self.tensors(rows=700)
        step.run(0, *tensors)
        self.assertEqual({tuple(sequence.lengths) for sequence in sequences}, {(1, 0)})
        self.assertEqual(len(self.library.requests), 2)
        first = len(self.library.requests[0][1].spans)
        self.library.status_of[self.library.requests[0][0]] = (FAILED_PRECONDITION, "no")
        with self.assertRaises(flashcore.FailedPrecondition):
            self.client.synchronize()
        self.assertEqual([sequence.lengths[0] for sequence in sequences], [0] * first + [1] * (700 - first))

    def test_spans_that_cannot_be_split_are_refused(self):
        spans = 4000
        # LSE of 2 heads: no span after the first part begins at a multiple of 16 bytes.
        sizes = [2] * 1000 + [3] + [4] * (spans - 1001)
        bounds = np.cumsum([0, *sizes])
        q, k, v = self.tensors(rows=int(bounds[-1]))
        self.refused("the request has 4000 spans.*multiple of 16", self.client.attend, q, k, v,
                     cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True,
                     kind=flashcore.ResourceExhausted)

    def test_the_end_of_the_connection_is_said_once_and_a_new_one_is_made(self):
        q, k, v = self.tensors()
        old = self.client.attend(q, k, v)
        self.library.stop()
        with self.assertRaisesRegex(flashcore.Unavailable, "ended the connection"):
            self.client.attend(q, k, v)
        with self.assertRaisesRegex(flashcore.Unavailable, "refused"):
            self.client.attend(q, k, v)
        self.library.down = False
        o = self.client.attend(q, k, old)  # in memory that the new connection does not have
        self.assertEqual(self.library.connections, 2)
        self.driver.run()
        self.client.synchronize()
        np.testing.assert_array_equal(content(o), v.array)

    def test_errors_are_said_before_a_new_connection_though_another_thread_receives_them(self):
        self.client.attend(*self.tensors())
        connection = self.client.core._transport._connection
        connection._received = True  # by another thread
        self.library.down = True

        def wait_for(call, deadline):  # until that thread has seen the end
            connection.fail(flashcore.Unavailable("the other thread saw the end"))
            return call.done()

        with mock.patch.object(connection, "wait_for", wait_for), \
                self.assertRaisesRegex(flashcore.Unavailable, "earlier request.*the other thread saw"):
            self.client.attend(*self.tensors())

    # Memory.

    def test_memory_is_reused_on_its_stream_at_once_and_on_no_other(self):
        tensor = self.empty()
        address = tensor.address
        self.assertNotEqual(self.empty().address, address, "it has an owner")
        del tensor
        self.assertNotEqual(self.empty(stream=OTHER).address, address)
        self.assertEqual(self.empty().address, address)

    def test_o_and_lse_keep_their_memory_until_both_are_gone(self):
        o, lse = self.client.attend(*self.tensors(), return_lse=True)
        address = o.address
        del o
        again, _ = self.client.attend(*self.tensors(), return_lse=True)
        self.assertNotEqual(again.address, address)
        del lse
        again, _ = self.client.attend(*self.tensors(), return_lse=True)
        self.assertEqual(again.address, address)

    def test_blocks_of_many_sizes_share_a_region(self):
        tensors = [self.empty(rows) for rows in (1, 10, 100, 200, 400)]
        self.assertEqual(len(self.library.device_regions), 1)
        places = sorted((tensor.address, tensor.address + content(tensor).nbytes) for tensor in tensors)
        for (_, end), (begin, _) in zip(places, places[1:]):
            self.assertLessEqual(end, begin)

    def test_steps_take_no_more_memory(self):
        q, k, v = self.tensors(rows=200)
        for _ in range(50):
            self.client.attend(q, k, v)
        self.assertLessEqual(len(self.library.device_regions), 2)

    def test_idle_memory_is_given_back_when_there_is_no_more(self):
        large = _device_memory._SMALL_BYTES // (HEADS * DIM * 2) + 1  # rows
        self.library.quota = 2 * _device_memory._GRANULARITY
        first = self.empty(large)
        del first
        second = self.empty(large, OTHER)
        self.assertEqual(self.driver.synchronized, 0)
        third = self.empty(large, OTHER)
        self.assertEqual((self.driver.synchronized, len(self.library.device_regions)), (1, 2))
        with self.assertRaisesRegex(flashcore.ResourceExhausted, "no device memory"):
            self.empty(large, OTHER)
        self.assertNotEqual(second.address, third.address)

    def test_close_with_requests_in_flight_leaves_tensors_their_memory(self):
        o = self.client.attend(*self.tensors())
        self.client.close()
        with self.assertRaisesRegex(flashcore.FailedPrecondition, "closed"):
            self.client.attend(*self.tensors())
        self.assertEqual(self.library.closed, [])
        content(o)[:] = 0
        del o  # the last reference, without a cycle
        self.assertEqual(self.library.closed, [1])

    # Sequences.

    def test_sequences(self):
        sequences = [self.client.create_sequence(2, HEADS, DIM) for _ in range(2)]
        q, k, v = self.tensors(rows=2)
        step = self.client.plan(sequences, num_heads=HEADS)
        outputs = [self.client.attend_batch(sequences, 0, q, k, v), step.run(0, q, k, v),
                   sequences[0].attend(1, Foreign(q.array[:1]))]
        self.assertEqual([sequence.lengths for sequence in sequences], [[2, 0], [2, 0]])
        self.driver.run()
        for o in outputs[:2]:
            np.testing.assert_array_equal(content(o), v.array)
        np.testing.assert_array_equal(content(outputs[2]), q.array[:1])
        spans = [list(request.spans) for _, request in self.library.requests]
        self.assertEqual([span.expected_length for span in spans[0] + spans[1]], [0, 0, 1, 1])
        self.client.synchronize()

    def test_lengths_are_taken_back_after_an_error(self):
        sequence = self.client.create_sequence(2, HEADS, DIM)
        self.library.status = (FAILED_PRECONDITION, "no")
        sequence.attend(1, *self.tensors())
        self.assertEqual(sequence.lengths, [0, 3])
        with self.assertRaises(flashcore.FailedPrecondition):
            self.client.synchronize()
        self.assertEqual(sequence.lengths, [0, 0])

    def test_other_calls_on_sequences_wait_for_the_answers(self):
        with self.client.create_sequence(2, HEADS, DIM) as sequence:
            sequence.attend(0, *self.tensors())
            self.client.create_sequence(2, HEADS, DIM)
            self.assertEqual(self.library.called[-1], ("CreateSequence", 1), "it waits for none")
        self.assertEqual(self.library.called[-1], ("DeleteSequence", 0))

    # Refused arguments.

    def refused(self, pattern, call, *args, kind=flashcore.InvalidArgument, **options):
        with self.assertRaisesRegex(kind, pattern):
            call(*args, **options)
        self.assertEqual(self.library.requests, [])

    def test_wrong_tensors(self):
        q, k, v = self.tensors()
        attend = self.client.attend
        self.refused("k: is in host memory", attend, q, k.array, v)
        self.refused("v: is on a GPU", attend, q.array, k.array, v)
        self.refused("v: has strides", attend, q, k, Foreign(v.array[:, :, ::-1]))
        self.refused("q: has dtype", attend, Foreign(q.array.astype(np.float32)), k, v)
        self.refused("v: is float16", attend, q, k, Foreign(v.array[:1]))
        self.refused("q: has a mask", attend, Foreign(q.array, mask=q), k, v)
        self.refused("q: has stream 0", attend, Foreign(q.array, stream=0), k, v)
        self.refused("q: is a Foreign that is not read", attend, Foreign(q.array, data=None), k, v)
        sequence = self.client.create_sequence(2, HEADS, DIM)
        self.refused("k, v: on a GPU", sequence.append, 0, k, v.array)
        self.refused("k, v: on a GPU", sequence.load, 0, k.array, v)

    def test_wrong_arguments_of_device_empty(self):
        for name, arguments in (("shape", (())), ("shape", (0, 2)), ("shape", 2)):
            self.refused(name, self.client.device_empty, arguments)
        self.refused("dtype", self.client.device_empty, (1,), "float64")
        self.refused("stream", self.client.device_empty, (1,), stream=-1)
        self.refused("device_id", self.client.device_empty, (1,), device_id=1)

    def test_other_transports(self):
        client = flashcore.connect("127.0.0.1:1")
        self.refused("target: 127.0.0.1:1; allowed: .*local:/path.*--local_device_tensors", client.attend,
                     *self.tensors())
        self.refused("target", client.device_empty, (1,))
        client.synchronize()

        async def run():
            async with aio.connect("local:/a") as client:
                with self.assertRaisesRegex(flashcore.Unimplemented, "flashcore.connect"):
                    await client.attend(*self.tensors())

        asyncio.run(run())


if __name__ == "__main__":
    unittest.main()
