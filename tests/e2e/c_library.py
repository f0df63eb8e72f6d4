"""libflashcore_c through ctypes: the C interface as another language sees it."""

import ctypes
import os

OK, AGAIN = 0, -1
SECOND = 10**9


class Options(ctypes.Structure):
    _fields_ = [("slots", ctypes.c_uint32), ("slot_bytes", ctypes.c_uint32),
                ("timeout_ns", ctypes.c_int64), ("spin_us", ctypes.c_uint32)]


class Memory(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64),
                ("region_id", ctypes.c_uint8 * 16)]


class Bytes(ctypes.Structure):
    _fields_ = [("data", ctypes.POINTER(ctypes.c_uint8)), ("size", ctypes.c_uint64)]


class Completion(ctypes.Structure):
    _fields_ = [("tag", ctypes.c_uint64), ("response", ctypes.POINTER(ctypes.c_uint8)),
                ("response_bytes", ctypes.c_uint64)]


class CClientError(Exception):
    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code = code


class CClient:
    """One connection with one ring. Use as a context manager."""

    def __init__(self, path, **options):
        library = self.library = ctypes.CDLL(os.environ["FLASHCORE_C_LIBRARY"])
        library.flashcore_last_error.restype = ctypes.c_char_p
        library.flashcore_identity.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()
        given = Options(timeout_ns=60 * SECOND, spin_us=20, **options)
        self.check(library.flashcore_connect(f"local:{path}".encode(), b"ctypes",
                                             ctypes.byref(given), ctypes.byref(self.handle)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.library.flashcore_close(self.handle)

    def check(self, code):
        if code > 0:
            raise CClientError(code, self.library.flashcore_last_error().decode())
        return code

    def identity(self):
        return self.library.flashcore_identity(self.handle).decode()

    def register(self, size):
        """Returns (region_id, writable memory)."""
        memory = Memory()
        self.check(self.library.flashcore_register_memory(
            self.handle, ctypes.c_uint64(size), 0, ctypes.c_int64(60 * SECOND),
            ctypes.byref(memory)))
        return bytes(memory.region_id), memoryview(
            (ctypes.c_uint8 * memory.bytes).from_address(memory.data)).cast("B")

    def call(self, method, request, response):
        message, out = request.SerializeToString(), Bytes()
        self.check(self.library.flashcore_call(
            self.handle, method.encode(), message, ctypes.c_uint64(len(message)),
            ctypes.c_int64(60 * SECOND), ctypes.byref(out)))
        data = ctypes.string_at(out.data, out.size) if out.size else b""
        self.library.flashcore_free(ctypes.byref(out))
        return response.FromString(data)

    def submit(self, tag, request):
        """False if the ring is full."""
        message = request.SerializeToString()
        return self.check(self.library.flashcore_submit(
            self.handle, ctypes.c_uint64(tag), message, ctypes.c_uint64(len(message)),
            ctypes.c_int64(60 * SECOND))) == OK

    def wait(self, response, seconds=60):
        """(tag, response), or None if none came."""
        completion = Completion()
        if self.check(self.library.flashcore_wait(
                self.handle, ctypes.c_int64(int(seconds * SECOND)),
                ctypes.byref(completion))) == AGAIN:
            return None
        return completion.tag, response.FromString(
            ctypes.string_at(completion.response, completion.response_bytes))

    def cancel(self, tag):
        self.check(self.library.flashcore_cancel(self.handle, ctypes.c_uint64(tag)))
