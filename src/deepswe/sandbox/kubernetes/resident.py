"""Process 1 of every pod: the resident server of all sandboxes, reached through sessions that may break and come back.

Its text is sent into the pod and runs there with the image's own python3 (3.10 or newer). A session is a command that
the cluster starts in the pod; that command passes its standard input and output to this process through a socket and
then only waits, so that no byte is copied twice and an end of the session ends nothing else.

The path through a cluster can lose bytes and say nothing (a slow reader does, on containerd 1.6), and the agent's code
runs as the same user as the session. So every frame carries a code over a secret of this sandbox, the session, the
direction and its number: what is lost, forged or repeated ends the session, the client opens another, and whatever was
not acknowledged is sent again. A call that was received runs once, however often it is asked for.

Greeting (from here): `MAGIC`, 16 random bytes. Frame: 4-byte length of the body, 32-byte code, body (as in
`deepswe.sandbox.server`, without its length).
"""

# ruff: noqa: SIM105  (as in the resident server, few imports)

import ctypes
import hmac
import os
import select
import signal
import socket
import struct
import sys
import time

from deepswe.sandbox import server

ADDRESS = "\0deepswe-sandbox"
MAGIC = b"deepswe1"
ACKNOWLEDGE, LEAVE = 5, 6
"""Kinds of frames besides the server's: an answer has arrived; end the sandbox."""
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
CODE_BYTES = 32
HEAD_BYTES = 4 + CODE_BYTES
NONCE_BYTES = 16
UP, DOWN = b"u", b"d"
PATIENCE_S = 10.0
"""How long a new session may take to show that it knows the secret."""
GUESTS = 8
"""New sessions that may wait for that at once."""
READ_BYTES = 1 << 18
COUNT_S = 0.2
FIRST_BODY_BYTES = 64
BODY_BYTES = 1 << 30


class Broken(Exception):
    """A frame was lost, cut or forged; the session is of no more use."""


class Codec:
    """Frames of one direction of one session, in order."""

    def __init__(self, key: bytes, nonce: bytes, direction: bytes) -> None:
        """Start at frame 0.

        Args:
            key: the sandbox's secret.
            nonce: the session's, from its greeting.
            direction: `UP` to the sandbox, `DOWN` from it.
        """
        self.key = key
        self.prefix = nonce + direction
        self.count = 0
        self.inbox = bytearray()

    def code(self, body: bytes) -> bytes:
        """The code of the next frame."""
        made = hmac.new(self.key, self.prefix + self.count.to_bytes(8, "big"), "sha256")
        made.update(body)
        self.count += 1
        return made.digest()

    def encode(self, body: bytes) -> bytes:
        """The next frame."""
        return len(body).to_bytes(4, "big") + self.code(body) + body

    def decode(self, data: bytes, most: int = BODY_BYTES) -> "list[bytes]":
        """Take what arrived; the bodies that are whole now.

        Raises:
            Broken: a code is wrong or a frame is longer than `most`.
        """
        self.inbox += data
        bodies = []
        while len(self.inbox) >= HEAD_BYTES:
            size = int.from_bytes(self.inbox[:4], "big")
            if size > most:
                raise Broken(f"a frame of {size} bytes")
            if len(self.inbox) < HEAD_BYTES + size:
                break
            code = bytes(self.inbox[4:HEAD_BYTES])
            body = bytes(self.inbox[HEAD_BYTES : HEAD_BYTES + size])
            del self.inbox[: HEAD_BYTES + size]
            if not hmac.compare_digest(code, self.code(body)):
                raise Broken("a frame was lost or changed on its way")
            bodies.append(body)
        return bodies


class Session:
    """One way in: the waiting command's socket, its standard input and output."""

    def __init__(self, waiter: socket.socket, source: int, target: int, key: bytes) -> None:
        self.waiter = waiter
        self.source = source
        self.target = target
        self.until = time.monotonic() + PATIENCE_S
        self.known = False
        nonce = os.urandom(NONCE_BYTES)
        self.reader = Codec(key, nonce, UP)
        self.writer = Codec(key, nonce, DOWN)
        self.outbox = bytearray(MAGIC + nonce)
        for descriptor in (source, target):
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)

    def pid(self) -> int:
        """The waiting command's process."""
        data = self.waiter.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(data[:4], sys.byteorder)


class PodServer(server.Server):
    """The resident server with sessions instead of one socket. One thread; every wait is the one poll."""

    def __init__(self, key: bytes, listener: socket.socket) -> None:
        """Listen for sessions.

        Args:
            key: the sandbox's secret.
            listener: at `ADDRESS`.
        """
        self.poll = select.poll()
        self.commands = {}
        self.readers = {}
        self.wake, self.alarm = os.pipe()
        for descriptor in (self.wake, self.alarm):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.alarm, warn_on_full_buffer=False)
        self.poll.register(self.wake, select.POLLIN)
        self.key = key
        self.listener = listener
        listener.setblocking(False)
        self.poll.register(listener.fileno(), select.POLLIN)
        self.sessions: dict[int, Session] = {}
        self.targets: dict[int, Session] = {}
        self.current: Session | None = None
        self.newest = 0
        self.answers: dict[int, bytes] = {}
        self.pids = 0
        self.counted = time.monotonic()

    def run(self) -> None:
        """Serve until told to leave."""
        while True:
            for descriptor, events in self.poll.poll(self.patience()):
                self.attend(descriptor, events)
            self.reap()
            self.expire()
            self.dismiss()
            self.count()

    def attend(self, descriptor: int, events: int) -> None:
        """Act on one event of the poll."""
        if descriptor == self.listener.fileno():
            self.accept()
        elif descriptor == self.wake:
            self.awake()
        elif descriptor in self.sessions:
            self.receive_from(self.sessions[descriptor])
        elif descriptor in self.targets:
            session = self.targets[descriptor]
            if events & ~select.POLLOUT:
                self.close(session)
            else:
                self.flush_to(session)
        elif descriptor in self.readers:
            self.drain(descriptor, server.CHUNK)

    def patience(self) -> "int | None":
        """Milliseconds until the next deadline; None without one."""
        ends = [session.until for session in self.sessions.values() if not session.known]
        ends += [command.deadline for command in self.commands.values()]
        if self.pids and server.has_children():
            ends.append(self.counted + COUNT_S)
        return max(0, int((min(ends) - time.monotonic()) * 1000) + 1) if ends else None

    # Sessions.

    def accept(self) -> None:
        """Take a new way in, and greet it."""
        try:
            waiter, _ = self.listener.accept()
        except OSError:
            return
        waiter.settimeout(1.0)
        try:
            descriptors = socket.recv_fds(waiter, 1, 2)[1]
        except OSError:
            descriptors = []
        if len(descriptors) != 2 or len(self.sessions) - (self.current is not None) >= GUESTS:
            for descriptor in descriptors:
                os.close(descriptor)
            waiter.close()
            return
        self.adopt(Session(waiter, descriptors[0], descriptors[1], self.key))

    def adopt(self, session: Session) -> None:
        """Serve a session from now on."""
        self.sessions[session.source] = session
        self.targets[session.target] = session
        self.poll.register(session.source, select.POLLIN)
        self.flush_to(session)

    def dismiss(self) -> None:
        """Close what has not shown in time that it knows the secret."""
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if not session.known and session.until <= now:
                self.close(session)

    def close(self, session: Session) -> None:
        """End one session; its waiting command ends with it."""
        if self.sessions.pop(session.source, None) is None:
            return
        del self.targets[session.target]
        for descriptor in (session.source, session.target):
            try:
                self.poll.unregister(descriptor)
            except KeyError:
                pass
            os.close(descriptor)
        session.waiter.close()
        if self.current is session:
            self.current = None

    def receive_from(self, session: Session) -> None:
        """Take what has arrived and act on whole frames."""
        try:
            data = os.read(session.source, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(session)
            return
        try:
            bodies = session.reader.decode(data, BODY_BYTES if session.known else FIRST_BODY_BYTES)
            frames = [server.unpack(body) for body in bodies]
        except (Broken, ValueError):
            self.close(session)
            return
        for call, kind, fields in frames:
            if not session.known:
                self.welcome(session)
            self.take(call, kind, fields)

    def welcome(self, session: Session) -> None:
        """A session has shown that it knows the secret: it replaces the one before."""
        session.known = True
        if self.current is not None:
            self.close(self.current)
        self.current = session

    def take(self, call: int, kind: int, fields: "list[bytes]") -> None:
        """Act on one request; one that was received before is not carried out again."""
        if kind == LEAVE:
            os._exit(0)
        elif kind == server.HELLO:
            self.pids = int(fields[0])
            image = [part for name, value in os.environb.items() for part in (name, value)]
            self.post(server.pack(0, server.HELLO, *image)[4:])
        elif kind == ACKNOWLEDGE:
            self.answers.pop(call, None)
        elif kind == server.CANCEL:
            self.cancel(call)
        elif call in self.answers:
            self.post(self.answers[call])
        elif call > self.newest:
            self.newest = call
            self.serve(call, kind, fields)

    # The wire.

    def send(self, call: int, kind: int, *fields: bytes) -> None:
        """Keep an answer until it is acknowledged, and send it."""
        self.answers[call] = server.pack(call, kind, *fields)[4:]
        self.post(self.answers[call])

    def post(self, body: bytes) -> None:
        """Queue one frame on the current session and send what it takes."""
        if self.current is not None:
            self.current.outbox += self.current.writer.encode(body)
            self.flush_to(self.current)

    def flush_to(self, session: Session) -> None:
        """Send what the session takes."""
        try:
            while session.outbox:
                with memoryview(session.outbox) as view:
                    sent = os.write(session.target, view[: server.CHUNK])
                del session.outbox[:sent]
        except BlockingIOError:
            self.poll.register(session.target, select.POLLOUT)
        except OSError:
            self.close(session)
        else:
            self.poll.register(session.target, 0)

    def count(self) -> None:
        """End everything if there are more processes than allowed: a pod itself has no such limit."""
        now = time.monotonic()
        if self.pids and now - self.counted >= COUNT_S:
            self.counted = now
            if sum(name.isdigit() for name in os.listdir("/proc")) > self.pids + 1 + len(self.sessions):
                for command in self.commands.values():
                    command.streams[1][1].add(b"sandbox: the limit on processes was reached; all were ended\n")
                self.kill_all()

    # Processes: the waiting commands of sessions are left alone, so that a timeout does not cost a session.

    def waiters(self) -> "set[int]":
        """Their process ids."""
        return {session.pid() for session in self.sessions.values()}

    def victims(self, command: server.Command) -> "list[int]":
        """The live processes that are not known to belong to another command."""
        spared = self.waiters()
        return [pid for pid in super().victims(command) if pid not in spared]

    def kill_all(self) -> None:
        """Kill all processes but this one and the waiting commands; these too, if that does not do."""
        give_up = time.monotonic() + 5
        rounds = 0
        while time.monotonic() < give_up:
            rounds += 1
            if rounds > 20:
                server.kill(-1)
            else:
                self.kill_others()
            self.reap()
            if not server.has_children():
                return
            time.sleep(0.0005)

    def kill_others(self) -> None:
        """Stop all other processes first, so that none can multiply, then kill them."""
        spared = self.waiters() | {1, os.getpid()}
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for name in os.listdir("/proc"):
                if name.isdigit() and int(name) not in spared:
                    try:
                        os.kill(int(name), number)
                    except OSError:
                        pass


def forbid(rules: "dict[str, bytes]") -> None:
    """Install a filter of system calls on this process and all that it starts. The cluster's own stays in force.

    Args:
        rules: machine -> BPF program; where this machine is not among them there is no filter of ours.
    """
    code = rules.get(os.uname().machine)
    if code is None:
        return
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, 2, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]} failed")


def main(
    rules: "dict[str, bytes]", key: bytes, listener: socket.socket, waiter: socket.socket, source: int, target: int
) -> None:
    """Serve for ever. Called by the program that `deepswe.sandbox.kubernetes.program` sends into the pod.

    Args:
        rules: for `forbid`.
        key: the sandbox's secret.
        listener: bound to `ADDRESS`.
        waiter, source, target: the session through which this text came.
    """
    server.hide_memory()
    server.limit(["4=0"])
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as for any process 1, the kernel then drops it
    forbid(rules)
    pod = PodServer(key, listener)
    pod.adopt(Session(waiter, source, target, key))
    pod.run()
