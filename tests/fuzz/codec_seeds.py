"""The seeds of codec_fuzzer: messages of the generated classes, and hand-made bytes that those never
write. A field that no seed sets is an error, so that the seeds follow the contract."""

from flashcore.v1 import attention_pb2 as pb

ATTEND, LOAD, RESPONSE = 0, 1, 2  # the first byte of an input
REGION = b"a region, 4 KiB!"  # kRegionInInputs of codec_values.h
VARINT, FIXED64, LENGTH, START_GROUP, END_GROUP, FIXED32 = range(6)


def varint(value: int, size: int = 0) -> bytes:
    """`value` as a varint of at least `size` bytes: overlong if it needs fewer."""
    out = bytearray()
    while value > 0x7F or len(out) < size - 1:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def tag(number: int, wire_type: int, size: int = 0) -> bytes:
    return varint(number << 3 | wire_type, size)


def field(number: int, payload: bytes) -> bytes:
    return tag(number, LENGTH) + varint(len(payload)) + payload


def group(number: int, content: bytes) -> bytes:
    return tag(number, START_GROUP) + content + tag(number, END_GROUP)


def attend() -> "pb.AttendRequest":
    """All fields of a request whose tensors travel in it."""
    request = pb.AttendRequest(
        request_id="id", dtype=pb.DTYPE_BFLOAT16, num_heads=300, num_kv_heads=4, head_dim=64,
        layout=pb.LAYOUT_HND, softmax_scale=0.25, precision=pb.PRECISION_INT8_QK_PV, return_lse=True, layer=2,
        query=b"q" * 130, key=b"kk", value=b"vvv")
    request.mask.kind = pb.Mask.KIND_SLIDING_WINDOW
    request.mask.window_left, request.mask.window_right = -1, 1 << 30
    request.spans.add(query_rows=1, kv_rows=2)
    request.spans.add(query_rows=3, sequence_id=bytes(range(16)), expected_length=1 << 40)
    return request


def streamed() -> "pb.AttendRequest":
    """A request of a stream."""
    request = small()
    request.timeout_ns = 1 << 40
    return request


def small() -> "pb.AttendRequest":
    """A valid request, small enough for the client to encode."""
    request = pb.AttendRequest(
        request_id="small", dtype=pb.DTYPE_FLOAT16, num_heads=4, num_kv_heads=2, head_dim=8,
        layout=pb.LAYOUT_NHD, precision=pb.PRECISION_INT8_QK, return_lse=True)
    request.spans.add(query_rows=2, kv_rows=5)
    request.spans.add(query_rows=1, kv_rows=1, sequence_id=bytes(range(16)), expected_length=7)
    return request


def shared(*tensors: str, region: bytes = REGION, offset: int = 64) -> "pb.AttendRequest":
    """small() with `tensors` in shared memory, each at its own multiple of `offset`."""
    request = small()
    for i, tensor in enumerate(tensors):
        place = getattr(request, f"{tensor}_range")
        place.region_id, place.offset = region, i * offset
        place.bytes = 48 if tensor == "lse" else 192
    return request


def load() -> "pb.LoadSequenceRequest":
    return pb.LoadSequenceRequest(
        sequence_id=bytes(range(16)), expected_length=0, layer=1, layout=pb.LAYOUT_NHD, rows=3,
        key=b"k" * 20, value=b"v" * 20)


def load_ranges() -> "pb.LoadSequenceRequest":
    chunk = load()
    chunk.ClearField("key")
    chunk.ClearField("value")
    chunk.key_range.region_id, chunk.key_range.offset = REGION, 64
    chunk.value_range.region_id, chunk.value_range.offset = REGION, 1 << 40
    chunk.key_range.bytes = chunk.value_range.bytes = 20
    return chunk


def response() -> "pb.AttendResponse":
    answer = pb.AttendResponse(request_id="id", output=b"o" * 40, lse=b"l" * 8,
                               sequence_lengths=[0, 127, 1 << 63])
    answer.timing.receive_ns, answer.timing.queue_ns, answer.timing.copy_in_ns = 1, 2, 3
    answer.timing.kernel_ns, answer.timing.copy_out_ns = 1 << 35, (1 << 64) - 1
    answer.timing.staging_wait_ns = 6
    return answer


def failed() -> "pb.AttendResponse":
    answer = pb.AttendResponse(request_id="id")
    answer.status.code, answer.status.message = 3, "query: 0 bytes; want 128"
    info = pb.ErrorInfo(reason="KV_FULL", domain="flashcore", metadata={"needed_bytes": "64"})
    answer.status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo",
                              value=info.SerializeToString())
    return answer


def nested(depth: int) -> bytes:
    return tag(40, START_GROUP) * depth + tag(40, END_GROUP) * depth


TENSORS = ("query", "key", "value", "output", "lse")


def timed(inputs: int = 8, results: int = 4088, region: bytes = REGION) -> "pb.AttendRequest":
    """small() with counters at these offsets."""
    request = shared(*TENSORS)
    for point, offset in ((request.inputs_ready, inputs), (request.results_ready, results)):
        point.region_id, point.offset, point.value = region, offset, 1 << 63
    return request


def shared_memory_seeds() -> dict:
    """Requests with ranges."""
    both = shared("query")
    both.query = b"q" * 10
    no_lse = shared(*TENSORS)
    no_lse.return_lse = False
    empty = shared(*TENSORS)
    del empty.spans[:]
    messages = {"all": shared(*TENSORS), "inputs": shared("query", "key", "value"),
                "output": shared("output", "lse"), "key_only": shared("key"),
                "unaligned": shared(*TENSORS, offset=100), "far": shared(*TENSORS, offset=3 << 60),
                "unknown_region": shared("value", region=b"0123456789abcdef"),
                "read_only_region": shared(*TENSORS, region=b"odd"),
                "no_region": shared("lse", region=b""), "with_its_tensor": both,
                "no_lse": no_lse, "no_spans": empty,
                "timed": timed(), "timed_unaligned": timed(inputs=4), "timed_beyond": timed(results=4096),
                "timed_far": timed(results=1 << 63), "timed_no_region": timed(region=b"")}
    return {f"shared_{name}": (ATTEND, 0, 0, message.SerializeToString())
            for name, message in messages.items()}


def require_all_fields(messages) -> None:
    """Fails unless the messages set each field of their types at least once."""
    wanted, found = set(), set()

    def visit(message):
        wanted.update(field.full_name for field in message.DESCRIPTOR.fields)
        for descriptor, value in message.ListFields():
            found.add(descriptor.full_name)
            if descriptor.type == descriptor.TYPE_MESSAGE:
                repeated = descriptor.label == descriptor.LABEL_REPEATED
                for inner in value if repeated else [value]:
                    visit(inner)

    for message in messages:
        visit(message)
    if wanted - found:
        raise SystemExit(f"codec_seeds.py: no seed has {', '.join(sorted(wanted - found))}")


def message_seeds() -> dict:
    """(kind, first slice, second slice, message) by name."""
    request, chunk, answer = (m.SerializeToString() for m in (attend(), load(), response()))
    ranges = shared(*TENSORS).SerializeToString()
    unknown = (tag(99, VARINT) + varint(5) + tag(98, FIXED64) + b"12345678" + field(97, b"bytes")
               + tag(96, FIXED32) + b"1234" + group(95, field(1, b"x") + group(2, b"")))
    return {
        "attend": (ATTEND, 0, 0, request),
        "attend_byte_slices": (ATTEND, 1, 1, request),
        "attend_odd_slices": (ATTEND, 7, 0, request),
        "attend_streamed": (ATTEND, 0, 0, streamed().SerializeToString()),
        "attend_small": (ATTEND, 0, 0, small().SerializeToString()),
        "shared_byte_slices": (ATTEND, 1, 1, ranges),
        "shared_then_inline": (ATTEND, 9, 5, ranges + request),
        "shared_range_twice": (ATTEND, 0, 0, ranges + field(34, field(1, b"other"))),
        "shared_range_truncated": (ATTEND, 0, 0, ranges[:-3]),
        "attend_twice": (ATTEND, 64, 3, request + request),
        "attend_unknown_fields": (ATTEND, 5, 9, unknown + request + unknown),
        "attend_tensors_of_other_wire_types": (
            ATTEND, 2, 3, tag(13, VARINT) + varint(1) + tag(14, FIXED32) + b"1234"
            + group(15, b"") + field(14, b"key")),
        "attend_unknown_precision": (ATTEND, 0, 0, request + tag(38, VARINT) + varint(3)),
        "attend_truncated": (ATTEND, 0, 0, request[:-1]),
        "attend_not_utf8": (ATTEND, 0, 0, field(1, b"\xff")),
        "load": (LOAD, 0, 0, chunk),
        "load_slices": (LOAD, 4, 11, chunk),
        "load_ranges": (LOAD, 5, 2, load_ranges().SerializeToString()),
        "load_empty_tensors_last": (LOAD, 0, 0, chunk + field(14, b"") + field(15, b"")),
        "load_truncated_in_tensor": (LOAD, 3, 3, chunk[:-5]),
        "response": (RESPONSE, 0, 0, answer),
        "response_slices": (RESPONSE, 1, 6, answer),
        "response_unpacked": (
            RESPONSE, 0, 0, b"".join(tag(6, VARINT) + varint(n) for n in (1, 300, 0))),
        "response_packed_in_two": (
            RESPONSE, 2, 2, field(6, varint(1) + varint(300)) + field(6, b"") + field(6, b"\x07")),
        "response_packed_truncated": (RESPONSE, 0, 0, field(6, b"\x07\x80")),
        "response_failed": (RESPONSE, 0, 0, failed().SerializeToString()),
        "group_nested": (ATTEND, 0, 0, nested(50)),
        "group_too_deep": (RESPONSE, 0, 0, nested(101)),
        "group_not_closed": (LOAD, 0, 0, tag(40, START_GROUP)),
        "group_closed_by_another": (LOAD, 0, 0, tag(40, START_GROUP) + tag(41, END_GROUP)),
        "group_not_opened": (LOAD, 0, 0, tag(40, END_GROUP)),
        "overlong_value": (ATTEND, 1, 2, tag(4, VARINT) + varint(5, 10)),
        "overlong_value_of_11_bytes": (ATTEND, 0, 0, tag(4, VARINT) + varint(5, 11)),
        "overlong_tag": (ATTEND, 3, 1, tag(4, VARINT, 5) + varint(5)),
        "overlong_tag_of_6_bytes": (ATTEND, 0, 0, tag(4, VARINT, 6) + varint(5)),
        "overlong_length": (ATTEND, 2, 1, tag(13, LENGTH) + varint(3, 5) + b"qqq"),
        "overlong_length_of_6_bytes": (ATTEND, 0, 0, tag(13, LENGTH) + varint(3, 6) + b"qqq"),
        "length_of_2_gib": (ATTEND, 0, 0, tag(13, LENGTH) + varint((1 << 31) - 1) + b"qqq"),
        "length_over_2_gib": (LOAD, 0, 0, tag(14, LENGTH) + varint(1 << 31) + b"kkk"),
        "tag_of_33_bits": (LOAD, 0, 0, varint(1 << 35 | 3 << 3) + varint(1)),
        "field_number_0": (LOAD, 0, 0, b"\x00\x01"),
        "wire_type_6": (RESPONSE, 0, 0, tag(1, 6)),
        "empty": (RESPONSE, 0, 0, b""),
    }


def seeds() -> dict:
    """The inputs by name."""
    require_all_fields([attend(), shared(*TENSORS), timed(), load(), load_ranges(), response(), failed(),
                        streamed()])
    inputs = {**message_seeds(), **shared_memory_seeds()}
    return {name: bytes(how) + message for name, (*how, message) in inputs.items()}
