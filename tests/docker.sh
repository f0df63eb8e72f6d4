#!/usr/bin/env bash
# Builds the CPU image and runs it as documented: unprivileged, read-only, without capabilities, the server
# as process 1. Checks health and results, and stops it under load. Uses buildah and podman: no daemon,
# no registry. Needs root.
#
#   tests/docker.sh                builds the Dockerfile, on a Debian that debootstrap makes (minutes)
#   tests/docker.sh --base FOLDER  builds it on the root file system in FOLDER
#   tests/docker.sh --built BUILD  packs the binaries of the build folder BUILD (seconds)
#
# Exit status: 0 if all is well; 1 if a check failed; 77, skipped, where containers cannot run.
set -euo pipefail
die() { echo "$0: $*" >&2; exit 1; }

case "${1:-}" in
  "") ;;
  --base | --built) [[ $# -eq 2 ]] || { echo "$0: $1 needs a value" >&2; exit 2; } ;;
  *) echo "$0: unknown argument '$1' (want --base FOLDER, --built BUILD)" >&2; exit 2 ;;
esac
[[ $# -eq 0 ]] || { folder=$(realpath -e "$2"); set -- "$1" "$folder"; }
cd "$(dirname "$0")/.."
source deploy/packages.sh

# Hides cgroups in a mount namespace of its own: podman then works without them.
if [[ -z ${FLASHCORE_HIDDEN_CGROUPS:-} ]]; then
  ensure_packages "${CONTAINER_PACKAGES[@]}"
  why=$(unshare --mount --pid --net --ipc --uts --fork true 2>&1) || { echo "skipped: $why"; exit 77; }
  FLASHCORE_HIDDEN_CGROUPS=1 exec unshare --mount --propagation private "./tests/docker.sh" "$@"
fi
mount -t tmpfs none /sys/fs/cgroup

work=$(mktemp -d)
name=flashcore
image=localhost/flashcore:cpu
storage=(--storage-driver vfs --root "$work/storage" --runroot "$work/run")
build() { buildah "${storage[@]}" bud --isolation chroot --format docker -t "$image" "$@"; }
podman() {
  command podman "${storage[@]}" --cgroup-manager cgroupfs --events-backend file --runtime crun "$@" \
    2> >(grep -v 'get systemd connection' >&2) # podman's timers for health checks, which this test does not use
}
cleanup() {
  podman rm --force --time 0 "$name" >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap cleanup EXIT

case "${1:-}" in
  --built)
    deploy/image_root.sh "$work/root" "$2"
    # The common part of the Dockerfile, on this root file system.
    { sed -n '/^FROM scratch AS runtime$/,/^$/p' Dockerfile && echo "COPY . /"; } >"$work/Dockerfile"
    build --file "$work/Dockerfile" "$work/root"
    ;;
  *)
    debian=${2:-$work/debian}
    if [[ ! -d $debian ]]; then
      ensure_packages debootstrap
      debootstrap --variant=minbase bookworm "$debian" >"$work/debootstrap.log" ||
        { tail -n 20 "$work/debootstrap.log" >&2; die "debootstrap failed"; }
    fi
    tar -C "$debian" -c . | podman import - localhost/debian
    build --build-arg CPU_IMAGE=localhost/debian --build-arg REVISION="$(git rev-parse HEAD)" --target cpu .
    ;;
esac

# The size that deploy/README.md gives, with a margin of 10%.
kind="without CUDA"
if [[ ${1:-} == --built ]] && grep -qE '^CMAKE_CUDA_COMPILER:[A-Z]+=/' "$2/CMakeCache.txt"; then
  kind="with CUDA"
fi
documented=$(tr '\n' ' ' <deploy/README.md | grep -oE "[0-9]+ MB $kind" | grep -oE '^[0-9]+') ||
  die "deploy/README.md does not give the size of an image $kind"
podman inspect "$image" --format '{{.Size}}' | awk -v kind="$kind" -v documented="$documented" '{
  size = $1 / 1e6
  printf "image %s: %.1f MB; documented: %d MB\n", kind, size, documented
  exit size < documented * 0.9 || size > documented * 1.1
}' || die "the size is not within 10% of the documented one"

# Without a network, a container has only its own loopback, so its ports are free.
limits=(--cgroups=disabled --ulimit nofile=1024:1024 --ulimit nproc=1024:1024)
podman run --detach --name "$name" --network none --read-only --cap-drop all "${limits[@]}" "$image" \
  >/dev/null
for ((i = 0; i < 600; ++i)); do
  ! podman healthcheck run "$name" >/dev/null 2>&1 || break
  sleep 0.1
done
podman healthcheck run "$name" || { podman logs "$name" >&2; die "the container is not healthy"; }
flashcore() { podman exec "$name" /usr/bin/flashcore "$@"; }
flashcore health
flashcore verify --cases=50 | tail -n 1
! flashcore health --target=127.0.0.1:1 --timeout=1s 2>/dev/null || die "health succeeds without a server"

pid=$(podman inspect "$name" --format '{{.State.Pid}}')
status() { awk -v field="$1:" '$1 == field {print $NF}' "/proc/$pid/status"; }
[[ $(status NSpid) == 1 ]] || die "the server is not process 1, but $(status NSpid)"
[[ $(status Uid) == 65532 ]] || die "the server runs as user $(status Uid)"
[[ $(status CapEff) == 0000000000000000 ]] || die "the server has capabilities $(status CapEff)"
awk '$5 == "/" {print $6}' "/proc/$pid/mountinfo" | grep -qE '^ro(,|$)' ||
  die "the root file system can be written"
for shell in /bin/sh /bin/bash /usr/bin/sh /usr/bin/bash; do
  [[ ! -e /proc/$pid/root$shell ]] || die "there is a $shell in the image"
done
echo "process 1, user 65532, no capabilities, a read-only root file system, no shell"

flashcore bench --duration=1h --concurrency=8 >/dev/null 2>&1 &
for ((i = 0; i < 600; ++i)); do
  in_flight=$(nsenter --target "$pid" --net curl -fsS http://127.0.0.1:9464/metrics |
    awk '/^flashcore_inflight_requests/ {print $NF}')
  ((in_flight == 0)) || break
  sleep 0.1
done
((in_flight > 0)) || die "no request arrived"
podman stop --time 40 "$name" >/dev/null
code=$(podman inspect "$name" --format '{{.State.ExitCode}}')
podman logs "$name" >"$work/log" 2>&1
die_with_log() { tail -n 50 "$work/log" >&2; die "$1"; }
[[ $code == 0 ]] || die_with_log "stopped under load, it exited with $code"
# Not always the last record: clients that go on calling are refused until the connections close.
grep '"msg":"drained"' "$work/log" || die_with_log "the log has no drain"
! grep '"level":"error"' "$work/log" || die_with_log "the log has errors"
echo "stopped with $in_flight requests in flight: exit status 0"
