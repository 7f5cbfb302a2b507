"""What is sent into a pod: the command that waits there for it, the command of a session, and the program itself.

The pod's specification carries only `BOOT`, some 800 bytes, so that thousands of pods weigh little on the API server.
The program (some 20 KB, compressed) goes through the first session, with its length and SHA-256, and is run only if
both are right.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import zlib
from pathlib import Path

from deepswe.sandbox import seccomp, server
from deepswe.sandbox.kubernetes import resident

WANTED = b"deepswe0"
"""Greeting of a pod that waits for the program."""
KEY_BYTES = 32
FLAGS = ("-I", "-S", "-E", "-X", "utf8", "-c")

BOOT = f"""import hashlib,os,socket,sys,zlib
if sys.version_info<(3,10):sys.exit('the sandbox needs Python 3.10 or newer; sandbox.kubernetes.python is '+sys.version)
l=socket.socket(socket.AF_UNIX)
l.bind({resident.ADDRESS!r})
l.listen(64)
def get(f,n):
 b=b''
 while len(b)<n:
  c=os.read(f,n-len(b))
  if not c:raise OSError('the session ended')
  b+=c
 return b
while 1:
 c,_=l.accept()
 f=[]
 try:
  f=socket.recv_fds(c,1,2)[1]
  os.write(f[1],{WANTED!r})
  n=int.from_bytes(get(f[0],4),'big')
  d=get(f[0],32)
  t=get(f[0],n)
  if hashlib.sha256(t).digest()!=d:raise OSError('the program was damaged')
 except (OSError,IndexError) as e:
  print(e,file=sys.stderr,flush=True)
  for x in f:os.close(x)
  c.close()
  continue
 exec(zlib.decompress(t[{KEY_BYTES}:]))
 start(t[:{KEY_BYTES}],l,c,f[0],f[1])
"""

SESSION = f"""import ctypes,socket,sys,time
ctypes.CDLL(None).prctl({server.PR_SET_DUMPABLE},0,0,0,0)
s=socket.socket(socket.AF_UNIX)
for i in range(200):
 try:s.connect({resident.ADDRESS!r});break
 except OSError as e:x=e;time.sleep(.05)
else:sys.exit('no server in the pod: %s'%x)
socket.send_fds(s,[b'f'],[0,1])
s.recv(1)
"""

_LOADER = """import sys,types
def _add(name,text):
 m=types.ModuleType(name)
 m.__path__=[]
 sys.modules[name]=m
 p,_,c=name.rpartition('.')
 if p:setattr(sys.modules[p],c,m)
 exec(compile(text,name,'exec',dont_inherit=True),m.__dict__)
for _name,_text in {modules!r}:_add(_name,_text)
def start(*values):sys.modules[{main!r}].main({rules!r},*values)
"""


def boot_command(python: str) -> list[str]:
    """The pod's own command: process 1, which waits for the program and turns into it."""
    return [python, *FLAGS, BOOT]


def session_command(python: str) -> list[str]:
    """The command of one session: passes its input and output to process 1 and waits."""
    return [python, *FLAGS, SESSION]


@functools.cache
def _program() -> bytes:
    texts = [("deepswe", ""), ("deepswe.sandbox", "")]
    texts += [(name, _source(name)) for name in (server.__name__, "deepswe.sandbox.kubernetes.resident")]
    texts.insert(3, ("deepswe.sandbox.kubernetes", ""))
    rules = {machine: seccomp.program(machine) for machine in seccomp.ARCHITECTURES}
    return zlib.compress(_LOADER.format(modules=texts, main=resident.__name__, rules=rules).encode(), 9)


def _source(name: str) -> str:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


def parcel(key: bytes) -> bytes:
    """What a pod that waits gets: length, SHA-256, then the sandbox's secret and the program.

    Args:
        key: `KEY_BYTES` random bytes.
    """
    content = key + _program()
    return len(content).to_bytes(4, "big") + hashlib.sha256(content).digest() + content
