"""The CPU kernels and OpenBLAS through ctypes, for benchmarks that time both in one process."""

import ctypes
import ctypes.util
import os

_FLOATS = ctypes.POINTER(ctypes.c_float)
_ROW_MAJOR, _NO_TRANSPOSE = 101, 111


class Missing(Exception):
    """A library is not there."""


def load_flashcore(path):
    """libflashcore_cpu_bench_c.so; cpu_bench_c.cc says what it has."""
    if not os.path.exists(path):
        raise Missing(f"{path} not found: cmake --build build --target flashcore_cpu_bench_c")
    library = ctypes.CDLL(os.path.abspath(path))
    library.flashcore_bench_new.restype = ctypes.c_void_p
    library.flashcore_bench_new.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.flashcore_bench_free.argtypes = [ctypes.c_void_p]
    library.flashcore_bench_run.argtypes = [ctypes.c_void_p]
    library.flashcore_bench_inputs.argtypes = [ctypes.c_void_p] + [_FLOATS] * 3
    library.flashcore_bench_output.argtypes = [ctypes.c_void_p, _FLOATS]
    library.flashcore_bench_simd_target.restype = ctypes.c_char_p
    return library


def load_openblas(threads):
    """OpenBLAS, which then uses `threads` threads."""
    name = ctypes.util.find_library("openblas")
    if name is None:
        raise Missing("libopenblas not found: apt install libopenblas0")
    library = ctypes.CDLL(name)
    library.openblas_set_num_threads(threads)
    library.openblas_get_config.restype = ctypes.c_char_p
    library.openblas_get_corename.restype = ctypes.c_char_p
    return library


def sgemm(library, n, a, b, c):
    """A call of C = A.B; each is the address of n * n floats."""
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    a, b, c = (ctypes.cast(matrix, _FLOATS) for matrix in (a, b, c))

    def run():
        library.cblas_sgemm(_ROW_MAJOR, _NO_TRANSPOSE, _NO_TRANSPOSE, n, n, n, one, a, n, b, n,
                            zero, c, n)

    return run


def sgemv(library, n, a, x, y):
    """A call of y = A.x; addresses of n * n, n and n floats."""
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    a, x, y = (ctypes.cast(values, _FLOATS) for values in (a, x, y))

    def run():
        library.cblas_sgemv(_ROW_MAJOR, _NO_TRANSPOSE, n, n, one, a, n, x, 1, zero, y, 1)

    return run
