"""Starts a runner inside the sandbox: `python -c` of this text. It reads the runner from its standard input.

Standard input: 64 bytes of header (the magic number of a Python's byte code in hexadecimal, then the lengths of what
follows), the runner as byte code of that Python, the runner as text, the request, and last the nonce. The nonce is left
unread: the reporter reads it after the worker was forked.
"""

import _frozen_importlib_external as external
import marshal
import posix


def take(size: int) -> bytes:
    """Exactly that many bytes of standard input."""
    data = b""
    while len(data) < size:
        part = posix.read(0, size - len(data))
        if not part:
            posix._exit(4)
        data += part
    return data


magic, *sizes = take(64).split()
code, text, request = (take(int(size)) for size in sizes)
fits = external.MAGIC_NUMBER.hex().encode() == magic
exec(marshal.loads(code) if fits else compile(text, "<runner>", "exec"), {"__name__": "runner", "request": request})
