"""The one commit that an attempt starts from, and the one diff that it ends with.

The diff is made in a git directory of our own, written when the attempt ends: the agent's configuration, attributes
filters, hooks, index, branches and replaced objects have no part in it. Attributes are neutral there (no line-end
conversion, no filters, no hidden differences), and byte code is never in it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from deepswe.errors import EnvironmentFault
from deepswe.grading.tree import ROOT
from deepswe.sandbox.base import ExecResult, Sandbox

COMMIT_TIMEOUT_S = 120.0
DIFF_TIMEOUT_S = 120.0
SNAPSHOTS = 64
"""Of so many small trees, those used last, the commit is kept."""
_OWN = "/tmp/.snapshot"
_IDENTITY = "agent <agent@localhost> 946684800 +0000"
_ATTRIBUTES = b"* !text !eol !ident !filter !working-tree-encoding !diff !merge\n"
_BINARY = _ATTRIBUTES.replace(b"!diff", b"-diff")
_EXCLUDED = b"__pycache__/\n*.py[co]\n.pytest_cache/\n"
_CONFIG = b"""[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tautocrlf = false
[user]
\tname = agent
\temail = agent@localhost
[gc]
\tauto = 0
"""
_SCRIPT = """set -e
git init -q --template= -b main .
git add -A -f -- . ':(exclude,glob)**/__pycache__/**' ':(exclude,glob)**/*.py[co]'
git -c core.logAllRefUpdates=false commit -q --no-verify --allow-empty -m 'Initial commit'
read -r commit < .git/refs/heads/main
echo "$commit"
"""
_DATE = "946684800 +0000"
_COMMIT_ENVIRONMENT = {"GIT_AUTHOR_DATE": _DATE, "GIT_COMMITTER_DATE": _DATE, "GIT_CONFIG_GLOBAL": "/dev/null"}
# The index is made anew, without file times: an edit that keeps a file's size, made within the second of the first
# commit, would otherwise not be seen ("racy git").
_DIFF_SCRIPT = """git read-tree "$1" && git add -A -- . || exit 90
exec git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-renames --no-color "$1" -- \
. ':(exclude,glob)**/__pycache__/**' ':(exclude,glob)**/*.py[co]' >&3
"""
_DIFF_ENVIRONMENT = {
    "GIT_DIR": _OWN,
    "GIT_WORK_TREE": ROOT,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "LC_ALL": "C",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The starting commit.

    Attributes:
        commit: its id.
        index: the bytes of git's index of it.
        objects: path under `.git/objects` -> bytes, of all its objects where they are known here, else empty.
    """

    commit: str
    index: bytes
    objects: Mapping[str, bytes]


class DiffRefused(Exception):
    """The work cannot be turned into a diff, because of what the agent did; the text says why."""


@functools.lru_cache(maxsize=SNAPSHOTS)
def snapshot_of(files: tuple[tuple[str, str], ...]) -> Snapshot:
    """`build_snapshot` of texts, which the attempts of a group share.

    Args:
        files: path relative to the root, and text.
    """
    return build_snapshot({path: text.encode() for path, text in files})


def build_snapshot(files: Mapping[str, bytes]) -> Snapshot:
    """The commit of a small tree, made here: some 0.3 ms, and no process in the sandbox.

    Args:
        files: path relative to the root -> bytes; all are plain files.
    """
    objects: dict[str, bytes] = {}
    blobs = {path: _store(objects, b"blob", data) for path, data in files.items()}
    tree = _store_tree(objects, {tuple(path.split("/")): blob for path, blob in blobs.items()})
    body = f"tree {tree.hex()}\nauthor {_IDENTITY}\ncommitter {_IDENTITY}\n\nInitial commit\n"
    commit = _store(objects, b"commit", body.encode())
    return Snapshot(commit.hex(), _index(blobs), objects)


def _store(objects: dict[str, bytes], kind: bytes, data: bytes) -> bytes:
    whole = b"%s %d\0%s" % (kind, len(data), data)
    digest = hashlib.sha1(whole, usedforsecurity=False)
    name = digest.hexdigest()
    objects[f"{name[:2]}/{name[2:]}"] = zlib.compress(whole, 1)
    return digest.digest()


def _store_tree(objects: dict[str, bytes], blobs: Mapping[tuple[str, ...], bytes]) -> bytes:
    """Store a directory given by path parts -> blob id, and its subdirectories."""
    inner: dict[str, dict[tuple[str, ...], bytes]] = {}
    entries: list[tuple[bytes, bytes, bytes]] = []
    for parts, blob in blobs.items():
        if len(parts) == 1:
            name = parts[0].encode()
            entries.append((name, b"100644 " + name, blob))
        else:
            inner.setdefault(parts[0], {})[parts[1:]] = blob
    for directory, content in inner.items():
        name = directory.encode()
        entries.append((name + b"/", b"40000 " + name, _store_tree(objects, content)))
    return _store(objects, b"tree", b"".join(head + b"\0" + ident for _, head, ident in sorted(entries)))


def _index(blobs: Mapping[str, bytes]) -> bytes:
    """git's index, version 2, without file times: git then compares contents."""
    data = struct.pack(">4sLL", b"DIRC", 2, len(blobs))
    for name, blob in sorted((path.encode(), blob) for path, blob in blobs.items()):
        entry = struct.pack(">10L20sH", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, 0, blob, min(len(name), 0xFFF)) + name
        data += entry + b"\0" * (8 - len(entry) % 8)
    return data + hashlib.sha1(data, usedforsecurity=False).digest()


def git_directory(snapshot: Snapshot) -> dict[str, bytes]:
    """The files of the agent's `.git`, as absolute path -> bytes."""
    files = {
        "HEAD": b"ref: refs/heads/main\n",
        "config": _CONFIG,
        "refs/heads/main": snapshot.commit.encode() + b"\n",
        "index": snapshot.index,
        "info/exclude": _EXCLUDED,
        **{f"objects/{name}": data for name, data in snapshot.objects.items()},
    }
    return {f"{ROOT}/.git/{name}": data for name, data in files.items()}


async def commit_tree(sandbox: Sandbox) -> Snapshot:
    """Commit whatever lies in the sandbox, with git there: for trees with a base layer.

    Raises:
        SandboxError: the sandbox failed.
        EnvironmentFault: git did.
    """
    settings = {"config": _CONFIG, "info/exclude": _EXCLUDED, "info/attributes": _ATTRIBUTES}
    result = await sandbox.exec(
        ["sh", "-c", _SCRIPT],
        timeout_s=COMMIT_TIMEOUT_S,
        cwd=ROOT,
        env=_COMMIT_ENVIRONMENT,
        files={f"{ROOT}/.git/{name}": data for name, data in settings.items()},
    )
    commit = result.stdout.decode("utf-8", "replace").strip()
    if result.exit_code or len(commit) != 40:
        raise EnvironmentFault(f"the tree could not be committed (exit code {result.exit_code}): {_words(result)}")
    return Snapshot(commit, await sandbox.read_file(f"{ROOT}/.git/index"), {})


async def make_diff(sandbox: Sandbox, snapshot: Snapshot) -> str:
    """The difference between the tree as it is and the commit, as a unified diff that `git apply` takes.

    Raises:
        DiffRefused: the agent left the sandbox so that there is no diff.
        SandboxError: the sandbox failed.
    """
    data = await _diff(sandbox, snapshot, _ATTRIBUTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    return (await _diff(sandbox, snapshot, _BINARY)).decode("ascii", "surrogateescape")


async def _diff(sandbox: Sandbox, snapshot: Snapshot, attributes: bytes) -> bytes:
    objects = {f"objects/{name}": data for name, data in snapshot.objects.items()}
    files = {
        "HEAD": b"ref: refs/heads/main\n",
        "config": b"[core]\n\tautocrlf = false\n\tsafecrlf = false\n[gc]\n\tauto = 0\n",
        "refs/heads/main": snapshot.commit.encode() + b"\n",
        "info/attributes": attributes,
        "info/exclude": _EXCLUDED,
        "index": snapshot.index,
        **(objects or {"objects/info/alternates": f"{ROOT}/.git/objects\n".encode()}),
    }
    try:
        result = await sandbox.exec(
            ["sh", "-c", _DIFF_SCRIPT, "sh", snapshot.commit],
            timeout_s=DIFF_TIMEOUT_S,
            cwd="/",
            env=_DIFF_ENVIRONMENT,
            channel=True,
            files={f"{_OWN}/{name}": data for name, data in files.items()},
        )
    except OSError as error:
        raise DiffRefused(f"there is no room left for a diff: {error}") from error
    if result.timed_out:
        raise DiffRefused(f"git did not finish within {DIFF_TIMEOUT_S:.0f} s")
    if result.exit_code:
        raise DiffRefused(f"git cannot compare the tree with its first commit: {_words(result)}")
    return result.channel


def _words(result: ExecResult) -> str:
    return result.stderr.decode("utf-8", "replace").strip()[-500:]
