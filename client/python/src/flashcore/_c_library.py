"""libflashcore_c.so, the C interface of the local socket (client/include/flashcore/c.h), by ctypes."""

import ctypes
import functools
import os
import pathlib
from typing import Any

from .errors import Unimplemented

OK, AGAIN = 0, -1


class Options(ctypes.Structure):
    _fields_ = [("slots", ctypes.c_uint32), ("slot_bytes", ctypes.c_uint32), ("timeout_ns", ctypes.c_int64),
                ("spin_us", ctypes.c_uint32)]


class Memory(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("region_id", ctypes.c_char * 16)]


class DeviceMemory(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("ordinal", ctypes.c_int32),
                ("region_id", ctypes.c_uint8 * 16)]


class Bytes(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_uint64)]


class Completion(ctypes.Structure):
    _fields_ = [("tag", ctypes.c_uint64), ("response", ctypes.c_void_p), ("response_bytes", ctypes.c_uint64)]


_Client, _Int, _Time, _Size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_Text = ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # the result's type, then the arguments'
    "connect": (_Int, _Text, _Text, ctypes.POINTER(Options), ctypes.POINTER(_Client)),
    "close": (None, _Client),
    "shutdown": (None, _Client),
    "ended": (_Int, _Client),
    "register_memory": (_Int, _Client, _Size, _Int, _Time, ctypes.POINTER(Memory)),
    "allocate_device_memory": (_Int, _Client, _Size, _Text, _Time, ctypes.POINTER(DeviceMemory)),
    "unregister_memory": (_Int, _Client, _Text),
    "call": (_Int, _Client, _Text, _Text, _Size, _Time, ctypes.POINTER(Bytes)),
    "free": (None, ctypes.POINTER(Bytes)),
    "submit": (_Int, _Client, _Size, _Text, _Size, _Time),
    "submit_on_stream": (_Int, _Client, _Size, _Text, _Size, _Time, ctypes.c_void_p),
    "poll": (_Int, _Client, ctypes.POINTER(Completion)),
    "wait": (_Int, _Client, _Time, ctypes.POINTER(Completion)),
    "event_fd": (_Int, _Client, ctypes.POINTER(_Int)),
    "cancel": (_Int, _Client, _Size),
    "last_status": (ctypes.c_void_p, ctypes.POINTER(_Size)),
}


class CLibrary:
    """Its functions, without their prefix flashcore_. They run without the interpreter's lock."""

    connect: Any
    close: Any
    shutdown: Any
    ended: Any
    register_memory: Any
    allocate_device_memory: Any
    unregister_memory: Any
    call: Any
    free: Any
    submit: Any
    submit_on_stream: Any
    poll: Any
    wait: Any
    event_fd: Any
    cancel: Any
    last_status: Any

    def __init__(self, path: pathlib.Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"flashcore_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


@functools.cache
def load() -> CLibrary:
    """$FLASHCORE_C_LIBRARY, or that of this package. Unimplemented if there is none."""
    path = pathlib.Path(os.environ.get("FLASHCORE_C_LIBRARY")
                        or pathlib.Path(__file__).with_name("libflashcore_c.so"))
    try:
        return CLibrary(path)
    except (OSError, AttributeError) as error:
        raise Unimplemented(
            f"target: local: needs the library libflashcore_c.so: {error}. This package was built without "
            f"it: install CMake and a C++ compiler, then run pip install --force-reinstall --no-cache-dir on "
            f"client/python again. Or name a library in $FLASHCORE_C_LIBRARY") from None
