#!/usr/bin/env bash
# Make the test images on an engine out of a root file system, through its API. What is there already is kept.
set -euo pipefail
socket="${1#unix://}"
rootfs="$2"
call() { curl -sS --fail-with-body --max-time 600 --unix-socket "$socket" "$@"; }
there() { curl -sf --max-time 60 --unix-socket "$socket" "http://engine/v1.40/images/$1/json" >/dev/null; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

if ! there localhost/deepswe-test:1; then
  # Tagged in a request of its own: podman 4 pays no attention to the tag of an import.
  id="$(call -X POST -H 'Content-Type: application/x-tar' --data-binary "@$rootfs" \
    'http://engine/v1.40/images/create?fromSrc=-&repo=localhost/deepswe-import' | grep -o 'sha256:[0-9a-f]*' | tail -1)"
  call -X POST "http://engine/v1.40/images/$id/tag?repo=localhost/deepswe-test&tag=1"
fi

derive() { # name, folder with a Dockerfile
  there "$1" && return
  tar -C "$2" -cf "$work/context.tar" .
  call -X POST -H 'Content-Type: application/x-tar' --data-binary "@$work/context.tar" \
    "http://engine/v1.40/build?t=$1&networkmode=none" >"$work/log"
  there "$1" || { tail -3 "$work/log" >&2; return 1; }
}
here="$(cd "$(dirname "$0")" && pwd)"
for name in r2e swebench nopython; do derive "localhost/deepswe-test-$name:1" "$here/images/$name"; done
