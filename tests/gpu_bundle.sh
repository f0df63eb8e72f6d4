#!/usr/bin/env bash
# Makes a folder for a GPU machine without packages and compiler: server, command line, all tests with
# the label gpu, the benchmarks, and their shared libraries.
#
#   tests/gpu_bundle.sh [FOLDER]        makes FOLDER (build/gpu); replaces an existing bundle
#   tests/gpu_bundle.sh --arch ARCH     compiles in build-gpu/ for ARCH, a CMake architecture (90-real)
#   tests/gpu_bundle.sh --build BUILD   uses the configured build folder BUILD and its architectures
#
# On the GPU machine, FOLDER/run_tests.sh runs the tests. It needs bash, and a python3 with grpcio,
# protobuf and numpy, which PYTHONPATH may name.
set -euo pipefail
fail() { echo "$0: $*" >&2; exit 2; }

root=$(realpath "$(dirname "$0")/..")
bundle=$root/build/gpu
build=""
arch=""
while (($#)); do
  case $1 in
    --arch | --build)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      if [[ $1 == --arch ]]; then arch=$2; else build=$(realpath "$2"); fi
      shift
      ;;
    -*) fail "unknown argument '$1' (want [FOLDER], --arch ARCH, --build BUILD)" ;;
    *) bundle=$(realpath -m "$1") ;;
  esac
  shift
done
[[ -z $arch || -z $build ]] || fail "--arch cannot be combined with --build, whose architectures are configured"
[[ ! -e $bundle || -e $bundle/run_tests.sh ]] || fail "$bundle exists and is not a bundle"

cd "$root"
source deploy/packages.sh
ensure_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
if [[ -z $build ]]; then
  build=$root/build-gpu
  # Every program contains all kernels. This compresses them to an eighth (nvcc 12.8 or later).
  cmake --preset release -B "$build" -DCMAKE_CUDA_ARCHITECTURES="${arch:-90-real}" \
    -DCMAKE_CUDA_FLAGS=--compress-mode=size
fi
cmake --build "$build" --target flashcore_gpu_bundle

rm -rf "$bundle"
mkdir -p "$(dirname "$bundle")"
cp -r "$build/gpu_bundle" "$bundle"
cp tests/gpu_run_tests.sh "$bundle/run_tests.sh"
git describe --always --dirty --abbrev=12 --exclude='*' >"$bundle/COMMIT"
mkdir "$bundle/lib"
mapfile -t programs < <(find "$bundle" -maxdepth 1 -type f ! -name run_tests.sh ! -name COMMIT)

# Copies all that ldd lists, except the C library and the driver, which belong to the machine.
ldd "${programs[@]}" | awk '$2 == "=>" {print $1, $3}' | sort -u |
  grep -vE '^lib(c|m|pthread|dl|rt|cuda)\.so' |
  while read -r name path; do
    [[ -e $path ]] || fail "$name is not found"
    cp -L "$path" "$bundle/lib/$name"
  done
strip "${programs[@]}"
# RPATH, not RUNPATH: RPATH also applies to the libraries' own dependencies.
patchelf --force-rpath --set-rpath '$ORIGIN/lib' "${programs[@]}"
echo "$bundle: $(du -sm "$bundle" | cut -f1) MB"
