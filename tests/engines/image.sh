#!/usr/bin/env bash
# The root file system of the test image, as a tar: the files of some installed Debian packages and what they depend on.
# Each file is one that dpkg lists, so nothing else of this machine gets in. Made once.
set -euo pipefail
target="$1"
[ -s "$target" ] && exit 0
command -v dpkg >/dev/null || { echo "image.sh: no dpkg here; load an image named deepswe-test:1 yourself" >&2; exit 1; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python3 - >"$work/packages" <<'END'
import re
roots = """base-files base-passwd bash coreutils dash diffutils findutils git grep gzip hostname libc-bin mawk patch procps
python3 sed tar util-linux""".split()
needs, given = {}, {}
for block in open("/var/lib/dpkg/status", encoding="utf-8").read().split("\n\n"):
    fields = dict(re.findall(r"^(Package|Status|Pre-Depends|Depends|Provides): (.*)$", block, re.MULTILINE))
    if fields.get("Status") == "install ok installed":
        name = fields["Package"]
        texts = [fields.get("Pre-Depends", ""), fields.get("Depends", "")]
        needs[name] = [re.split(r"[ :(]", choice.strip())[0] for text in texts for choice in re.split(r"[,|]", text)]
        for other in fields.get("Provides", "").split(","):
            given.setdefault(re.split(r"[ :(]", other.strip())[0], name)
found, left = set(), list(roots)
while left:
    name = left.pop()
    name = name if name in needs else given.get(name, "")
    if name and name not in found:
        found.add(name)
        left += needs[name]
print("\n".join(sorted(found)))
END
while read -r package; do dpkg -L "$package" 2>/dev/null || true; done <"$work/packages" |
  grep -Ev '^/(usr/share/(doc|man|info|locale|lintian|bug|perl|zoneinfo)|usr/include|etc|var|lib/modules|boot|run|sys|proc|dev)(/|$)' |
  sed -e 's,^/,,' -e '/^$/d' -e '/^\.$/d' | sort -u |
  while read -r path; do if [ -L "/$path" ] || { [ -e "/$path" ] && [ ! -d "/$path" ]; }; then echo "$path"; fi; done >"$work/files"
mkdir -p "$work/extra/etc" "$work/extra/tmp" "$work/extra/root" "$work/extra/var/tmp" "$work/extra/proc" \
  "$work/extra/sys" "$work/extra/dev" "$work/extra/run"
chmod 1777 "$work/extra/tmp" "$work/extra/var/tmp"
chmod 700 "$work/extra/root"
printf 'root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$work/extra/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$work/extra/etc/group"
printf 'root:*:19000::::::\n' >"$work/extra/etc/shadow"
printf 'passwd: files\ngroup: files\nhosts: files\n' >"$work/extra/etc/nsswitch.conf"
cp /etc/ld.so.cache "$work/extra/etc/"
mkdir -p "$work/extra/usr/bin"
for name in awk which pager; do
  real="$(readlink -f "/usr/bin/$name" || true)"
  [ -f "$real" ] && grep -qx "${real#/}" "$work/files" && ln -s "$real" "$work/extra/usr/bin/$name"
done || true
# Merged /usr: the packages list some files under /bin and /lib, which are links.
for name in bin sbin lib lib64 lib32 libx32; do
  if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$work/extra/$name"; fi
done
sed -E 's,^(bin|sbin|lib|lib64|lib32|libx32)/,usr/\1/,' "$work/files" | grep -Ev '^(usr/bin/(awk|which|pager)|bin|sbin|lib|lib64|lib32|libx32)$' | sort -u >"$work/all"
tar --create --file "$work/rootfs.tar" --directory "$work/extra" --owner=0 --group=0 --numeric-owner .
tar --append --file "$work/rootfs.tar" --directory / --owner=0 --group=0 --numeric-owner --no-recursion --files-from "$work/all"
mv "$work/rootfs.tar" "$target"
