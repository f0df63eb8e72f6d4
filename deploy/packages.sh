# The Debian 12 packages that FlashCore needs. Source it, then call
#   ensure_packages NAME...
# which installs the missing ones. It needs root or sudo only if one is missing.

BUILD_PACKAGES=(
  cmake ninja-build g++ pkg-config
  libgrpc++-dev protobuf-compiler-grpc protobuf-compiler libprotobuf-dev
  libabsl-dev prometheus-cpp-dev libhwy-dev nlohmann-json3-dev libmicrohttpd-dev
)
# prometheus brings promtool. The Python packages are for the end-to-end tests, patchelf for deploy/wheel
# and tests/gpu_bundle.sh, openssl for tests/e2e/tls_test.py. ccache saves what was compiled before.
TEST_PACKAGES=(
  libgtest-dev libgmock-dev libbenchmark-dev patchelf openssl ccache
  prometheus docker-compose
  python3 python3-grpcio python3-protobuf python3-numpy python3-yaml mypy
  python3-pip python3-setuptools python3-wheel # they build and install client/python and deploy/wheel
)
STRESS_PACKAGES=(haproxy nginx libopenblas0) # for tests/run.sh --stress
SANITIZER_PACKAGES=(clang libclang-rt-dev)
LINT_PACKAGES=(clang-format clang-tidy flake8 ccache)
PICTURE_PACKAGES=(python3-matplotlib) # for tests/bench/dashboard_picture.py
CONTAINER_PACKAGES=(buildah podman crun curl) # for tests/docker.sh

ensure_packages() {
  local missing=() package
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  local sudo=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || {
      echo "These packages are missing, and installing them needs root: ${missing[*]}" >&2
      return 1
    }
    sudo=(sudo)
  fi
  echo "Installing: ${missing[*]}"
  # Without this policy, installing the prometheus package would start its server. 101 forbids it.
  local policy=/usr/sbin/policy-rc.d own_policy=false status=0
  if [[ ! -e $policy ]]; then
    own_policy=true
    printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" >/dev/null
    "${sudo[@]}" chmod 755 "$policy"
  fi
  {
    "${sudo[@]}" apt-get update -qq &&
      "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  } || status=$?
  if $own_policy; then "${sudo[@]}" rm -f "$policy"; fi
  return "$status"
}
