"""The seeds of local_fuzzer: frames, and steps of a ring. local_fuzzer.cc says what an input is."""
import struct

import codec_seeds
from codec_seeds import field, tag, varint

FRAMES, RING = b"\0", b"\1"
REGION = b"a region, 8 KiB!"  # kRegionInInputs of local_fuzzer.cc
SLOT = 256
VARINT = codec_seeds.VARINT


def frame(*requests: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(request)) + request for request in requests)


def request(number: int, action: int, message: bytes) -> bytes:
    """A LocalRequest."""
    return tag(1, VARINT) + varint(number) + field(action, message)


def slot(tag_of_it: int, message: bytes, timeout_ns: int = 0, reserved: int = 0,
         length: int = -1) -> bytes:
    size = len(message) if length < 0 else length
    return struct.pack("<QQII", tag_of_it, timeout_ns, size, reserved) + message


def step(submitted: int, received: int, content: bytes) -> bytes:
    assert len(content) < SLOT
    return struct.pack("<bbB", submitted, received, len(content)) + content


def attend(region: bytes = REGION, offset: int = 2048) -> bytes:
    """A request that is valid, with all tensors in the region."""
    message = codec_seeds.shared("query", "key", "value", "output", "lse", region=region,
                                 offset=offset)
    message.head_dim = 16
    del message.spans[1:]
    for tensor, size in (("query", 256), ("key", 320), ("value", 320), ("output", 256), ("lse", 32)):
        getattr(message, f"{tensor}_range").bytes = size
    return message.SerializeToString()


def seeds() -> dict:
    hello = request(1, 2, tag(1, VARINT) + varint(1) + tag(2, VARINT) + varint(1))
    register = request(2, 3, tag(1, VARINT) + varint(4096))
    call = request(3, 7, field(1, b"GetServerInfo") + field(2, b""))
    good = slot(7, attend())
    frames = {
        "session": frame(hello, register, call),
        "empty": frame(b""),
        "in_the_length": frame(hello) + b"\x05\0",
        "in_the_message": frame(hello)[:-2],
        "too_large": b"\xff\xff\xff\x7f" + hello,
        "the_largest": frame(b"x" * 1024),
        "over_the_limit": frame(b"x" * 1025),
    }
    rings = {
        "one": step(1, 0, good),
        "eight": b"".join(step(1, int(i > 0), slot(i, attend())) for i in range(8)),
        "full": b"".join(step(1, 0, slot(i, b"")) for i in range(4)),
        "over": b"".join(step(1, 0, slot(i, b"")) for i in range(5)),
        "back": step(1, 0, good) + step(-1, 0, b""),
        "received_ahead": step(1, 1, good),
        "received_back": step(1, 0, good) + step(1, 1, good) + step(1, -1, good),
        "too_long": step(1, 0, slot(1, b"", length=SLOT)),
        "longest": step(1, 0, slot(1, b"", length=SLOT - 24)),
        "reserved": step(1, 0, slot(1, attend(), reserved=1)),
        "far": step(1, 0, slot(1, attend(offset=3 << 60))),
        "overlapping_the_ring": step(1, 0, slot(1, attend(offset=16))),
        "unknown_region": step(1, 0, slot(1, attend(region=b"0123456789abcdef"))),
        "inline": step(1, 0, slot(1, codec_seeds.small().SerializeToString())),
    }
    return {**{f"frames_{name}": FRAMES + data for name, data in frames.items()},
            **{f"ring_{name}": RING + data for name, data in rings.items()}}
