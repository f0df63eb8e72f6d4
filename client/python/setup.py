"""Builds the package of pyproject.toml and compiles the contract into it.

The contract becomes flashcore/attention.binpb, a FileDescriptorSet. Unlike generated Python it loads with
every version of protobuf, whichever protoc wrote it.
"""

import importlib.util
import pathlib
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
CONTRACT = "flashcore/v1/attention.proto"
# A source distribution has its own copy of the checkout's proto/.
PROTO = next(folder for folder in (HERE / "proto", HERE / "../../proto") if (folder / CONTRACT).exists())


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        root = HERE / "src" if getattr(self, "editable_mode", False) else pathlib.Path(self.build_lib)
        tools = importlib.util.find_spec("grpc_tools") is not None
        protoc = [sys.executable, "-m", "grpc_tools.protoc"] if tools else ["protoc"]
        compiled = root / "flashcore" / "attention.binpb"
        subprocess.run([*protoc, f"--proto_path={PROTO}", f"--descriptor_set_out={compiled}", CONTRACT],
                       check=True)


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list) -> None:
        super().make_release_tree(base_dir, files)
        copy = pathlib.Path(base_dir, "proto", CONTRACT)
        copy.parent.mkdir(parents=True)
        shutil.copy(PROTO / CONTRACT, copy)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
