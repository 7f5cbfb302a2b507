#!/usr/bin/env bash
# Docker and Podman for the tests, apart from any that this machine runs already. As root, on Debian or Ubuntu.
#
#   engines.sh install            installs both, without starting anything
#   engines.sh start docker|podman    starts one under $DEEPSWE_ENGINES and loads the test images
#   engines.sh stop               ends both and removes all that they made
#   engines.sh address docker|podman  prints the address of one
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(realpath -m "${DEEPSWE_ENGINES:-${TMPDIR:-/tmp}/deepswe-engines}")"

say() { echo "engines: $*" >&2; }

address() { echo "unix://$root/$1/engine.sock"; }

alive() { [ -f "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

install() {
  missing=()
  for pair in dockerd:docker.io docker:docker.io iptables:iptables podman:podman runc:runc; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
  [ ${#missing[@]} = 0 ] && return
  command -v apt-get >/dev/null || { say "no apt-get here; install docker and podman yourself"; return 1; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
}

answers() { curl -sf --max-time 5 --unix-socket "$root/$1/engine.sock" http://engine/_ping >/dev/null; }

start_docker() {
  # No bridge and no firewall rules: sandboxes have no network. The init script of the package is not used.
  runtimes=()
  ! command -v runsc >/dev/null || runtimes=(--add-runtime "runsc=$here/runsc.sh")
  dockerd --data-root "$root/docker/data" --exec-root "$root/docker/exec" --pidfile "$root/docker/pid" \
    --host "unix://$root/docker/engine.sock" --iptables=false --ip6tables=false --bridge=none "${runtimes[@]}" \
    >"$root/docker/log" 2>&1 </dev/null &
}

start_podman() {
  # cgroup version 1 and a hard limit of open files below podman's default need these settings.
  limit="$(ulimit -Hn)"
  cat >"$root/podman/containers.conf" <<EOF
[containers]
default_ulimits = ["nofile=$limit:$limit", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
EOF
  cat >"$root/podman/storage.conf" <<EOF
[storage]
driver = "overlay"
graphroot = "$root/podman/data"
runroot = "$root/podman/run"
EOF
  # Its monitors leave a file "oom" wherever the service was started.
  CONTAINERS_CONF="$root/podman/containers.conf" CONTAINERS_STORAGE_CONF="$root/podman/storage.conf" \
    env -C "$root/podman" podman --tmpdir "$root/podman/tmp" system service --time=0 "unix://$root/podman/engine.sock" \
    >"$root/podman/log" 2>&1 </dev/null &
  echo $! >"$root/podman/pid"
}

start() {
  mkdir -p "$root/$1"
  if ! alive "$root/$1/pid" || ! answers "$1"; then
    "start_$1"
    for _ in $(seq 300); do answers "$1" && break; sleep 0.2; done
    answers "$1" || { say "$1 does not answer:"; tail -5 "$root/$1/log" >&2; return 1; }
  fi
  "$here/image.sh" "$root/rootfs.tar"
  "$here/load.sh" "$(address "$1")" "$root/rootfs.tar"
}

stop() {
  for name in docker podman; do
    alive "$root/$name/pid" || continue
    pid="$(cat "$root/$name/pid")"
    curl -sf --max-time 20 --unix-socket "$root/$name/engine.sock" \
      'http://engine/v1.40/containers/json?all=1' 2>/dev/null | { grep -o '"Id":"[0-9a-f]*"' || true; } | cut -d'"' -f4 |
      while read -r id; do
        curl -s --max-time 60 --unix-socket "$root/$name/engine.sock" \
          -X DELETE "http://engine/v1.40/containers/$id?force=1&v=1" >/dev/null || true
      done
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 150); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
    kill -9 "$pid" 2>/dev/null || true
  done
  # Whatever mounts are left under our root, innermost first; then the files.
  awk -v root="$root/" 'index($5, root) == 1 { print $5 }' /proc/self/mountinfo | sort -r |
    while read -r place; do umount -l "$place" || true; done
  # And the control groups that the engines made, as far as nothing is in them.
  for group in /sys/fs/cgroup/docker /sys/fs/cgroup/libpod_parent /sys/fs/cgroup/*/docker /sys/fs/cgroup/*/libpod_parent; do
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
  rm -rf "$root"
}

case "${1:-}" in
  install) install ;;
  start) start "$2" ;;
  stop) stop ;;
  address) address "$2" ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
