"""Builds the wheel flashcore_server: the server, the command line and the shared libraries that they need.

Needs the checkout, and the packages of deploy/packages.sh. Environment variables:

  FLASHCORE_BUILD_DIR  a build folder whose flashcore-server and flashcore to pack. Without it, CMake builds
                       both in build-wheel/, with CUDA kernels where there is a CUDA compiler
  CMAKE_ARGS           more options of CMake for that build, such as -DCMAKE_CUDA_ARCHITECTURES=90-real
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ("server/flashcore-server", "client/cli/flashcore")  # in a build folder
# Machine code for A100 (and its family, sm_86), L4 and H100; PTX for newer GPUs, compiled by their driver.
CUDA_ARCHITECTURES = "80;89-real;90a-real"
# The machine's own: glibc, and the driver's library, which the CUDA runtime opens at run time.
PLATFORM = re.compile(r"(ld-linux.*|lib(c|m|pthread|dl|rt|resolv|cuda))\.so\.\d+")
# Packages whose headers are compiled in.
HEADERS = ("nlohmann-json3-dev",)
BUNDLED = """\
The shared libraries in lib/, the Debian or Ubuntu packages that they come from, and the versions of these.
licences/PACKAGE has the copyright and licence of a package; the other files there are licences that it names.

"""
BUNDLED_CUDA = """
The CUDA runtime is linked into bin/flashcore-server. Its licence: https://docs.nvidia.com/cuda/eula
"""


def run(*command, check=True):
    return subprocess.run(list(map(str, command)), check=check, text=True, stdout=subprocess.PIPE,
                          stderr=None if check else subprocess.DEVNULL).stdout


def build_folder() -> pathlib.Path:
    """The build folder with the programs. Runs CMake unless FLASHCORE_BUILD_DIR names one."""
    given = os.environ.get("FLASHCORE_BUILD_DIR")
    if given:
        for program in PROGRAMS:
            if not pathlib.Path(given, program).is_file():
                sys.exit(f"setup.py: FLASHCORE_BUILD_DIR={given} has no {program}: build it there first")
        return pathlib.Path(given)
    folder = ROOT / "build-wheel"
    options = ["-B", folder, f"-DCMAKE_CUDA_ARCHITECTURES={CUDA_ARCHITECTURES}",
               *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    subprocess.run(["cmake", "--preset", "image", *options], check=True, cwd=ROOT)
    targets = [pathlib.Path(program).name for program in PROGRAMS]
    subprocess.run(["cmake", "--build", folder, "--target", *targets], check=True)
    return folder


def shared_libraries(programs) -> dict:
    """{name: path} of the shared libraries that the programs load, but for those of PLATFORM."""
    found = dict(re.findall(r"^\s*(\S+) => (.*?)(?: \(0x\w+\))?$", run("ldd", *programs), re.MULTILINE))
    missing = sorted(name for name, path in found.items() if path == "not found")
    if missing:
        sys.exit(f"setup.py: the programs need libraries that are not found: {', '.join(missing)}")
    return {name: pathlib.Path(path) for name, path in found.items() if not PLATFORM.fullmatch(name)}


def packages_of(libraries) -> dict:
    """{path: package} of the files that are of a Debian package."""
    if shutil.which("dpkg-query") is None:
        return {}
    # A package may list a file in /lib that is now in /usr/lib.
    names = {}
    for path in libraries:
        real = str(path.resolve())
        names.update({real: path, real.removeprefix("/usr"): path})
    owners = re.findall(r"^([^:,\s]+)\S*: (.*)$", run("dpkg-query", "-S", *names, check=False), re.MULTILINE)
    return {names[name]: package for package, name in owners}


def write_licences(folder: pathlib.Path, libraries: dict) -> None:
    """Writes BUNDLED and licences/ into `folder`."""
    owners = packages_of(libraries.values())
    lines = [f"{name}  {owners.get(path, f'no package ({path})')}" for name, path in libraries.items()]
    strangers = sorted(name for name, path in libraries.items() if path not in owners)
    if strangers:
        print("setup.py: libraries of no package, whose licences you must add before you pass the wheel on: "
              + ", ".join(strangers), file=sys.stderr)
    packages = sorted({*owners.values(), *HEADERS}) if owners else []
    versions = run("dpkg-query", "-W", "-f", "${Package} ${Version}\n", *packages) if packages else ""
    cuda = b".nv_fatbin" in folder.joinpath("bin", "flashcore-server").read_bytes()
    folder.joinpath("BUNDLED").write_text(
        BUNDLED + "\n".join(sorted(lines)) + "\n\n" + versions + (BUNDLED_CUDA if cuda else ""))
    licences = folder / "licences"
    common = set()
    for package in packages:
        copyright_file = pathlib.Path("/usr/share/doc", package, "copyright")
        text = copyright_file.read_text(encoding="utf-8", errors="replace")
        licences.joinpath(package).write_text(text, encoding="utf-8")
        common.update(re.findall(r"/usr/share/common-licenses/([A-Z][\w.-]*\w)", text))
    for name in sorted(common):
        if (licence := pathlib.Path("/usr/share/common-licenses", name)).exists():
            shutil.copy(licence, licences / name)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            sys.exit("setup.py: an editable install would have no programs: install without -e")
        package = pathlib.Path(self.build_lib, "flashcore_server")
        programs = [build_folder() / program for program in PROGRAMS]
        libraries = shared_libraries(programs)
        for name in ("bin", "lib", "licences"):
            shutil.rmtree(package / name, ignore_errors=True)  # of an earlier build
            package.joinpath(name).mkdir()
        for name, sources in (("bin", {path.name: path for path in programs}), ("lib", libraries)):
            for file, source in sources.items():
                shutil.copy(source, package / name / file)
        copies = [package / "bin" / path.name for path in programs]
        subprocess.run(["strip", *copies], check=True)
        # RPATH, not RUNPATH: it also applies to the libraries' own dependencies, and goes before
        # LD_LIBRARY_PATH, which other Python packages set.
        subprocess.run(["patchelf", "--force-rpath", "--set-rpath", "$ORIGIN/../lib", *copies], check=True)
        write_licences(package, libraries)


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # programs belong to a platform as extensions do


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple:
        """The programs need no Python of a version, and the glibc of the newest symbol that they import."""
        package = pathlib.Path(self.get_finalized_command("build_py").build_lib, "flashcore_server")
        needed = run("objdump", "-p", *package.glob("bin/*"), *package.glob("lib/*"))
        minor = max(map(int, re.findall(r"\bGLIBC_2\.(\d+)", needed)))
        return "py3", "none", f"manylinux_2_{minor}_x86_64"


version = re.search(r"^project\(flashcore VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
setup(version=version.group(1), distclass=PlatformDistribution,
      cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
