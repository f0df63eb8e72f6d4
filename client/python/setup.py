"""Builds the package of pyproject.toml, and compiles the contract and the C library into it.

The contract becomes flashcore/attention.binpb, a FileDescriptorSet. Unlike generated Python it loads with
every version of protobuf, whichever protoc wrote it.

The C library, for targets "local:/path", is built with CMake and a C++ compiler. Where there are none, or not
on Linux, the package has no such targets, and its wheel is for any platform. $FLASHCORE_C_LIBRARY names one
that is built already; "none" leaves it out.
"""

import atexit
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
CONTRACT = "flashcore/v1/attention.proto"
# The parts of the checkout that are built. A source distribution has its own copy, in the folder `checkout`.
ROOT = next(root for root in (HERE / "checkout", HERE.parents[1]) if (root / "proto" / CONTRACT).exists())
SOURCES = (f"proto/{CONTRACT}", "proto/wire/frames.*", "proto/wire/ring.h", "proto/wire/start_thread.h",
           "client/c/*", "client/local/*", "client/include/flashcore/c.h")


@functools.lru_cache(maxsize=None)
def c_library() -> "pathlib.Path | None":
    """The C library, built at most once. None: there is none, which has been said."""
    given = os.environ.get("FLASHCORE_C_LIBRARY")
    if given == "none":
        return None
    if given:
        return pathlib.Path(given)
    try:
        if not sys.platform.startswith("linux"):
            raise OSError(f"no local socket on {sys.platform}")
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        subprocess.run(["cmake", "-S", ROOT / "client" / "c", "-B", folder, "-DCMAKE_BUILD_TYPE=Release"],
                       check=True)
        subprocess.run(["cmake", "--build", folder], check=True)
        return pathlib.Path(folder, "libflashcore_c.so")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"warning: this build of flashcore does not reach targets local:/path: {error}. It needs CMake "
              f"and a C++ compiler for them.", file=sys.stderr)
        return None


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        root = HERE / "src" if getattr(self, "editable_mode", False) else pathlib.Path(self.build_lib)
        tools = importlib.util.find_spec("grpc_tools") is not None
        protoc = [sys.executable, "-m", "grpc_tools.protoc"] if tools else ["protoc"]
        compiled = root / "flashcore" / "attention.binpb"
        subprocess.run([*protoc, f"--proto_path={ROOT / 'proto'}", f"--descriptor_set_out={compiled}",
                        CONTRACT], check=True)
        library = c_library()
        if library is not None:
            shutil.copy(library, root / "flashcore" / "libflashcore_c.so")


class BdistWheel(bdist_wheel):
    """With the C library, the wheel is for this platform and every Python 3."""

    def run(self) -> None:
        if c_library() is not None:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> "tuple[str, str, str]":
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list) -> None:
        super().make_release_tree(base_dir, files)
        for pattern in SOURCES:
            for path in ROOT.glob(pattern):
                copy = pathlib.Path(base_dir, "checkout", path.relative_to(ROOT))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel, "sdist": Sdist})
