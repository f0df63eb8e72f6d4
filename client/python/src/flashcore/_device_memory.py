"""Memory of the server's GPU that one connection shares with it, in blocks.

A block belongs to the CUDA stream on which it was first used, as in PyTorch's caching allocator: it is used
again on that stream alone, in its order. So a block is free as soon as nobody has it, though the GPU may
still work on it, and no host waits.
"""

import collections
import threading
from typing import Any

from . import _device_tensors
from ._local_connection import Connection
from ._local_memory import size_class
from .errors import ResourceExhausted

_REGION_BYTES = 4 << 20  # of a region with many blocks
_CUT_BYTES = 256 << 10  # of it are cut into blocks of one size at a time
_SMALL_BYTES = 512 << 10  # larger blocks have a region of their own
_GRANULARITY = 2 << 20  # of a region: what the driver maps

_Kind = tuple[int, int, str]  # of a block: its size, its stream, the server's device


class Region:
    """Memory of one LocalAllocateDeviceMemory."""

    __slots__ = ("address", "bytes", "ordinal", "region_id")

    def __init__(self, memory: Any) -> None:
        self.address, self.bytes, self.ordinal = memory.address, memory.bytes, memory.ordinal
        self.region_id = bytes(memory.region_id)


class Block:
    """A piece of a region. `home`: where it waits while nobody has it."""

    __slots__ = ("region", "offset", "home")

    def __init__(self, region: Region, offset: int, home: "collections.deque[Block]") -> None:
        self.region, self.offset, self.home = region, offset, home

    @property
    def address(self) -> int:
        return self.region.address + self.offset


class Lent:
    """A block that a call or tensors have: free once they are gone. Keeps the connection's memory mapped."""

    __slots__ = ("block", "memory")

    def __init__(self, block: Block, memory: "DeviceMemory") -> None:
        self.block, self.memory = block, memory

    def __del__(self) -> None:
        # Without a lock: it may run while this thread has any.
        self.block.home.append(self.block)


class DeviceMemory:
    """The blocks of one connection. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._growing = threading.Lock()
        self._homes: dict[_Kind, collections.deque[Block]] = {}
        self._regions: list[Region] = []  # replaced, never changed
        self._uncut: dict[str, tuple[Region, int]] = {}  # what is left of one, from where, by device

    def lend(self, size: int, stream: int, device_id: str, left: float) -> Lent:
        """A block of at least `size` bytes for work in the order of `stream`. May wait for the server if it
        makes one."""
        size = size_class(size)
        if size > _SMALL_BYTES:
            size = -(-size // _GRANULARITY) * _GRANULARITY
        home = self._homes.setdefault((size, stream, device_id), collections.deque())
        while True:
            try:
                return Lent(home.pop(), self)
            except IndexError:
                self._grow(size, device_id, home, left)

    def find(self, address: int, size: int) -> tuple[bytes, int] | None:
        """The region's id and the offset of memory that requests use in place; None if it is elsewhere."""
        for region in self._regions:
            offset = address - region.address
            if 0 <= offset <= region.bytes - size and offset % 16 == 0:
                return region.region_id, offset
        return None

    def _grow(self, size: int, device_id: str, home: "collections.deque[Block]", left: float) -> None:
        with self._growing:
            if home:
                return
            if size > _SMALL_BYTES:
                home.append(Block(self._allocate(size, device_id, left), 0, home))
                return
            region, begin = self._uncut.get(device_id, (None, 0))
            if region is None or region.bytes - begin < size:
                region, begin = self._allocate(_REGION_BYTES, device_id, left), 0
            count = min((region.bytes - begin) // size, max(1, _CUT_BYTES // size))
            self._uncut[device_id] = region, begin + count * size
            home.extend([Block(region, begin + i * size, home) for i in range(count)])

    def _allocate(self, size: int, device_id: str, left: float) -> Region:
        try:
            region = Region(self._connection.allocate(size, device_id, left))
        except ResourceExhausted:
            if not self._drop_idle():
                raise
            region = Region(self._connection.allocate(size, device_id, left))
        self._regions = [*self._regions, region]
        return region

    def _drop_idle(self) -> bool:
        """Gives regions of large idle blocks back. Waits for the GPU, as PyTorch's allocator does when memory
        is short: work that was enqueued may use them."""
        idle: list[Block] = []
        for (size, _, _), home in list(self._homes.items()):
            while home and size > _SMALL_BYTES:
                idle.append(home.pop())
        if not idle:
            return False
        dropped = {block.region.region_id for block in idle}
        self._regions = [region for region in self._regions if region.region_id not in dropped]
        _device_tensors.synchronize()
        for block in idle:
            self._connection.unregister(block.region.region_id)
        return True
