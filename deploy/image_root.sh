#!/usr/bin/env bash
# Makes the root file system of an image: the server, the command line and their libraries.
#
#   deploy/image_root.sh FOLDER BUILD    from the build folder BUILD
set -euo pipefail
root=$1
build=$2

mkdir -p "$root"/{etc,usr/bin,usr/lib,usr/lib64}
ln -s usr/lib usr/lib64 "$root"
install --strip "$build/server/flashcore-server" "$build/client/cli/flashcore" "$root/usr/bin"
ldd "$root"/usr/bin/* | grep -oE '/(usr/)?lib[^ ]*' | sort -u | xargs cp -L --parents -t "$root"
# NVIDIA's container runtime reads debian_version to find where the loader looks for libcuda.
cp -L --parents /etc/os-release /etc/debian_version "$root"
echo 'flashcore:x:65532:65532::/:/sbin/nologin' >"$root/etc/passwd"
