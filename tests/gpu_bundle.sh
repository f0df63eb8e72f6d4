#!/usr/bin/env bash
# Makes a folder that runs on a GPU machine with neither packages nor a compiler: server, command line,
# every test with the label gpu, the kernel benchmark, and the shared libraries of all.
#
#   tests/gpu_bundle.sh [FOLDER]        in FOLDER (build/gpu); replaces a bundle that is there
#   tests/gpu_bundle.sh --arch ARCH     compiled in build-gpu/ for ARCH, as CMake says it (90-real)
#   tests/gpu_bundle.sh --build BUILD   from BUILD, a configured build folder, for its architectures
#
# There, FOLDER/run_tests.sh runs the tests. It needs bash and a python3 that has grpcio, protobuf and
# numpy; PYTHONPATH may name them.
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
[[ -z $arch || -z $build ]] || fail "--arch does not go with --build, which has been configured"
[[ ! -e $bundle || -e $bundle/run_tests.sh ]] || fail "$bundle is there, and is no bundle"

cd "$root"
source deploy/packages.sh
ensure_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
if [[ -z $build ]]; then
  build=$root/build-gpu
  # Every program has all kernels in it, an eighth as large when compressed so (nvcc 12.8 or later).
  cmake --preset release -B "$build" -DCMAKE_CUDA_ARCHITECTURES="${arch:-90-real}" \
    -DCMAKE_CUDA_FLAGS=--compress-mode=size
fi
cmake --build "$build" --target flashcore_gpu_bundle

rm -rf "$bundle"
mkdir -p "$(dirname "$bundle")"
cp -r "$build/gpu_bundle" "$bundle"
cp tests/gpu_run_tests.sh "$bundle/run_tests.sh"
mkdir "$bundle/lib"
mapfile -t programs < <(find "$bundle" -maxdepth 1 -type f ! -name run_tests.sh)

# All that ldd lists, but the C library and the driver: these belong to the machine.
ldd "${programs[@]}" | awk '$2 == "=>" {print $1, $3}' | sort -u |
  grep -vE '^lib(c|m|pthread|dl|rt|cuda)\.so' |
  while read -r name path; do
    [[ -e $path ]] || fail "$name is not found"
    cp -L "$path" "$bundle/lib/$name"
  done
strip "${programs[@]}"
# RPATH, not RUNPATH: it also holds for what the libraries need themselves.
patchelf --force-rpath --set-rpath '$ORIGIN/lib' "${programs[@]}"
echo "$bundle: $(du -sm "$bundle" | cut -f1) MB"
