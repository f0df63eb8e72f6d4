"""A file system of a user (FUSE) that does not answer when a file is closed."""

import ctypes
import errno
import os
import struct
import threading

# Constants of linux/fuse.h.
LOOKUP, FORGET, GETATTR, OPEN, RELEASE, FLUSH = 1, 2, 3, 14, 18, 25
INIT, INTERRUPT, BATCH_FORGET = 26, 36, 42
HEADER = struct.Struct("<IIQQIIII")
FILE_NODE = 2
MNT_FORCE, MNT_DETACH = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _call(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def _attributes(node):
    mode = 0o100644 if node == FILE_NODE else 0o40755
    return struct.pack("<6Q10I", node, 4096, 8, *6 * [0], mode, 1, os.getuid(), os.getgid(), 0, 4096, 0)


class SilentFileSystem:
    """Mounted at `folder`, with a file at `path`. Other processes' closes of the file wait until `answer`, or
    the end. Use as a context manager; OSError if this process may not mount."""

    def __init__(self, folder):
        self.folder, self.path = folder, os.path.join(folder, "file")

    def __enter__(self):
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            _call(_libc.mount(b"silent", os.fsencode(self.folder), b"fuse", 0,
                              f"fd={self._device},rootmode=40000,user_id={os.getuid()},"
                              f"group_id={os.getgid()}".encode()), "mount")
        except OSError:
            os.close(self._device)
            raise
        self._lock = threading.Lock()
        self._waiting = []  # closes
        self._answers = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.answer()
        _libc.umount2(os.fsencode(self.folder), MNT_FORCE | MNT_DETACH)
        self._thread.join()

    def waiting(self):
        """How many closes wait."""
        with self._lock:
            return len(self._waiting)

    def answer(self):
        """Ends the closes, those of later, too."""
        with self._lock:
            self._answers = True
            for unique in self._waiting:
                self._reply(unique)
            self._waiting.clear()

    def _serve(self):
        while True:
            try:
                request = os.read(self._device, 1 << 17)
            except OSError as error:
                if error.errno == errno.ENOENT:  # the request is gone
                    continue
                os.close(self._device)  # unmounted
                return
            _, operation, unique, node, _, _, process, _ = HEADER.unpack_from(request)
            self._handle(operation, unique, node, process)

    def _handle(self, operation, unique, node, process):
        if operation in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        if operation == INIT:
            self._reply(unique, struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 16, 12, 1 << 16, 1, 16, *9 * [0]))
        elif operation == LOOKUP:
            entry = struct.pack("<4Q2I", FILE_NODE, 0, 3600, 3600, 0, 0)
            self._reply(unique, entry + _attributes(FILE_NODE))
        elif operation == GETATTR:
            self._reply(unique, struct.pack("<Q2I", 3600, 0, 0) + _attributes(node))
        elif operation == OPEN:
            self._reply(unique, struct.pack("<Q2I", 1, 0, 0))
        elif operation == FLUSH and process != os.getpid():
            with self._lock:
                if not self._answers:
                    self._waiting.append(unique)
                    return
            self._reply(unique)
        elif operation in (FLUSH, RELEASE):
            self._reply(unique)
        else:
            self._reply(unique, error=errno.ENOSYS)

    def _reply(self, unique, data=b"", error=0):
        try:
            os.write(self._device, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
        except OSError:
            pass  # the request is gone
