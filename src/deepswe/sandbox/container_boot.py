"""What runs as process 1 of a container: the resident server over the container's own input and output.

Its text and the server's go into the container as an argument of the image's `python3 -c` (3.10 or newer): nothing is
installed, mounted or copied, and an image whose files are read-only will do as well.
"""

from __future__ import annotations

import base64
import functools
import zlib
from pathlib import Path

from deepswe.sandbox import container_resident, server

FLAGS = ("-I", "-S", "-E", "-X", "utf8", "-c")
OLDEST = (3, 10)

_LOADER = """import sys
if sys.version_info < {oldest}:
    sys.exit("the sandbox's server needs Python {wanted} or newer; " + sys.executable + " is " + sys.version.split()[0])
import binascii, zlib
def load(name, text):
    module = type(sys)(name)
    module.__path__ = []
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    if above: setattr(sys.modules[above], last, module)
    exec(compile(zlib.decompress(binascii.a2b_base64(text)), name, "exec", dont_inherit=True, optimize=2),
        module.__dict__)
for name, text in {modules!r}: load(name, text)
sys.modules[{main!r}].main()
"""


def seal(frame: bytes) -> bytes:
    """What follows each frame on the way to a container and back."""
    return container_resident.seal(frame)


@functools.cache
def _program() -> str:
    modules = [("deepswe", _packed("")), ("deepswe.sandbox", _packed(""))]
    for module in (server, container_resident):
        assert module.__file__ is not None
        modules.append((module.__name__, _packed(Path(module.__file__).read_text(encoding="utf-8"))))
    wanted = ".".join(map(str, OLDEST))
    return _LOADER.format(oldest=OLDEST, wanted=wanted, modules=modules, main=container_resident.__name__)


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def command(python: str, rules: bytes) -> list[str]:
    """The container's command.

    Args:
        python: interpreter in the container.
        rules: system call filter that the server puts on itself and on all that it starts; empty for none.
    """
    return [python, *FLAGS, _program(), base64.b64encode(rules).decode()]
