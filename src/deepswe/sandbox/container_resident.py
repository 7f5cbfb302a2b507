"""The program of process 1 in a container; see `container_boot`. It runs there: the standard library is all it has."""

import _signal  # type: ignore[import-not-found]
import binascii
import ctypes
import posix
import struct
import sys

from deepswe.sandbox import server

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
INSTRUCTION_BYTES = 8
RLIMIT_CORE = 4
SEAL_BYTES = 4


def seal(frame: bytes) -> bytes:
    """A check over one frame: an engine that loses or repeats output is noticed at the first frame that it touches."""
    return binascii.crc32(frame).to_bytes(SEAL_BYTES, "big")


class SealedServer(server.Server):
    """The resident server, every frame followed by its check."""

    seal_bytes = SEAL_BYTES

    def seal(self, frame: bytes) -> bytes:
        """The check of one frame."""
        return seal(frame)


def filter_calls(rules: bytes) -> None:
    """Put a system call filter on this process and on all that it will start.

    Args:
        rules: an array of `struct sock_filter`.
    """
    server.libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    code = ctypes.create_string_buffer(rules, len(rules))
    program = struct.pack("@HP", len(rules) // INSTRUCTION_BYTES, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program)) != 0:
        sys.exit(f"the kernel takes no system call filter (errno {ctypes.get_errno()})")


def main() -> None:
    """Serve on the descriptors 0 and 1; the argument is the filter."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # as process 1 it then does not notice it
    server.hide_memory()
    server.limit([f"{RLIMIT_CORE}=0"])
    rules = binascii.a2b_base64(sys.argv[1])
    if rules:
        filter_calls(rules)
    source, target = posix.dup(0), posix.dup(1)
    null = posix.open(b"/dev/null", posix.O_RDWR)
    for descriptor in (0, 1, 2):
        posix.dup2(null, descriptor)
    posix.close(null)
    posix.umask(0o022)
    posix.chdir("/")
    SealedServer(source, target).run()
    posix._exit(0)
