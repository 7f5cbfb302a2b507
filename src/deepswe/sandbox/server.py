"""The resident server: process 1 of every sandbox. Runs commands and moves files for the supervisor outside.

A clone of the launcher goes on as it (`deepswe.sandbox.walls`), or bubblewrap starts it as
`python -I -S -E server.pyc`, compiled once per pool. So it imports nothing but built-in modules: each import costs
every sandbox time and memory. The supervisor imports the frame codec from here.

A frame is a 4-byte length, a 4-byte call number, a 1-byte kind and fields, each a 4-byte length and bytes; integers are
big-endian, numbers in fields are ASCII decimals. Nothing in it is ever evaluated, on either side.

Being process 1 of the namespace, it cannot be killed or stopped from inside (the kernel drops such signals), every
orphan becomes its child, and all processes end when it does. It ends when the supervisor's socket closes.
"""

# ruff: noqa: SIM105  (contextlib is an import too)

import _ctypes
import _signal  # type: ignore[import-not-found]
import errno
import posix
import select
import sys
import time

EXEC, CANCEL, READ, WRITE, WRITE_EXEC = 1, 2, 3, 4, 7
"""Kinds of requests; 5 and 6 are those of `deepswe.sandbox.kubernetes.resident`."""
DONE, DATA, WRITTEN, FAILED, HELLO = 10, 11, 12, 13, 14
CHUNK = 1 << 16
CHANNEL_BYTES = 64 << 20
KILLED = 137
MARK = b"SANDBOX_CALL"
REGULAR, DIRECTORY, KIND = 0o100000, 0o040000, 0o170000
CONTROL = 3
PR_SET_DUMPABLE = 4


def pack(call: int, kind: int, *fields: bytes) -> bytes:
    """One frame, its length in front."""
    body = b"".join([part for field in fields for part in (len(field).to_bytes(4, "big"), field)])
    return b"%b%b%b%b" % ((len(body) + 5).to_bytes(4, "big"), call.to_bytes(4, "big"), kind.to_bytes(1, "big"), body)


def unpack(body: bytes) -> "tuple[int, int, list[bytes]]":
    """Call, kind and fields of one frame without its length.

    Raises:
        ValueError: it is not a frame.
    """
    if len(body) < 5:
        raise ValueError(f"frame of {len(body)} bytes")
    fields = []
    at = 5
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        at += 4
        if at + size > len(body):
            raise ValueError("frame field beyond its end")
        fields.append(body[at : at + size])
        at += size
    return int.from_bytes(body[:4], "big"), body[4], fields


def number(value: int) -> bytes:
    """A number as a field."""
    return b"%d" % value


class Sink:
    """What is kept of one stream: its first and last halves of `limit` bytes, or its first `limit` if `whole`."""

    def __init__(self, limit: int, whole: bool = False) -> None:
        self.head_limit = limit if whole else limit - limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.dropped = 0

    def add(self, data: bytes) -> None:
        """Take what arrived."""
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if not data:
            return
        self.tail += data
        if len(self.tail) > self.tail_limit + (CHUNK << 2):
            self.trim()

    def trim(self) -> None:
        """Drop what lies between the two halves."""
        surplus = len(self.tail) - self.tail_limit
        if surplus > 0:
            del self.tail[:surplus]
            self.dropped += surplus

    def kept(self) -> bytes:
        """What is kept."""
        self.trim()
        return bytes(self.head + self.tail)


class Command:
    """One running command."""

    def __init__(self, call: int, pid: int, started: float, deadline: float) -> None:
        self.call = call
        self.pid = pid
        self.started = started
        self.deadline = deadline
        self.timed_out = False
        self.sinks: dict[int, Sink] = {}
        self.streams: list[tuple[int, Sink]] = []


class Server:
    """The loop. One thread; every wait is the one poll."""

    seal_bytes = 0

    def __init__(self, source: int = CONTROL, target: int = CONTROL) -> None:
        """Serve a descriptor to read requests from, and the same or another one to write answers to."""
        self.source = source
        self.target = target
        self.poll = select.poll()
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.commands: dict[int, Command] = {}
        self.readers: dict[int, Sink | None] = {}
        wake, self.alarm = posix.pipe()
        self.wake = wake
        posix.set_blocking(wake, False)
        posix.set_blocking(self.alarm, False)
        for descriptor in (source, target):
            posix.set_blocking(descriptor, False)
            posix.set_inheritable(descriptor, False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(self.alarm, warn_on_full_buffer=False)
        self.poll.register(wake, select.POLLIN)
        self.poll.register(source, select.POLLIN)
        self.want_room(False)

    def run(self) -> None:
        """Serve until the supervisor is gone."""
        self.send(0, HELLO)
        while True:
            for descriptor, events in self.poll.poll(self.patience()):
                if descriptor == self.target:
                    if events & select.POLLOUT:
                        self.flush()
                    if descriptor != self.source and events & ~select.POLLOUT:
                        return
                if descriptor == self.source:
                    if events & ~select.POLLOUT and not self.receive():
                        return
                elif descriptor == self.wake:
                    self.awake()
                elif descriptor in self.readers:
                    self.drain(descriptor, CHUNK)
            self.reap()
            self.expire()

    def patience(self) -> "int | None":
        """Milliseconds until the next deadline; None without one."""
        if not self.commands:
            return None
        first = min(command.deadline for command in self.commands.values())
        return max(0, int((first - time.monotonic()) * 1000) + 1)

    def awake(self) -> None:
        """Empty the pipe that signals write to."""
        try:
            posix.read(self.wake, 4096)
        except BlockingIOError:
            pass

    # The wire.

    def want_room(self, wanted: bool) -> None:
        """Whether to be woken when more can be written."""
        events = select.POLLOUT if wanted else 0
        self.poll.register(self.target, events | (select.POLLIN if self.target == self.source else 0))

    def seal(self, frame: bytes) -> bytes:
        """What follows a frame, `seal_bytes` long, where the way can lose bytes."""
        return b""

    def send(self, call: int, kind: int, *fields: bytes) -> None:
        """Queue one frame and send what the socket takes."""
        frame = pack(call, kind, *fields)
        self.outbox += frame
        self.outbox += self.seal(frame)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self.outbox:
                with memoryview(self.outbox) as view:
                    sent = posix.write(self.target, view[: CHUNK << 2])
                del self.outbox[:sent]
        except BlockingIOError:
            self.want_room(True)
        except OSError:
            posix._exit(0)
        else:
            self.want_room(False)

    def receive(self) -> bool:
        """Take what has arrived and act on whole frames; False once the supervisor is gone."""
        try:
            data = posix.read(self.source, CHUNK << 2)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.inbox += data
        while len(self.inbox) >= 4:
            size = 4 + int.from_bytes(self.inbox[:4], "big")
            if len(self.inbox) < size + self.seal_bytes:
                break
            frame = bytes(self.inbox[:size])
            seal = bytes(self.inbox[size : size + self.seal_bytes])
            del self.inbox[: size + self.seal_bytes]
            if seal != self.seal(frame):
                return False
            self.serve(*unpack(frame[4:]))
        return True

    def serve(self, call: int, kind: int, fields: "list[bytes]") -> None:
        """Act on one request."""
        path = b""
        try:
            if kind == EXEC:
                self.start(call, fields)
            elif kind == CANCEL:
                self.cancel(call)
            elif kind == READ:
                path = fields[0]
                self.send(call, DATA, read_file(path, int(fields[1])))
            elif kind == WRITE:
                for position in range(1, len(fields), 2):
                    path = fields[position]
                    write_file(path, fields[position + 1], fields[0] == b"1")
                self.send(call, WRITTEN)
            elif kind == WRITE_EXEC:  # number of files, their paths and bytes, then as for EXEC
                end = 1 + 2 * int(fields[0])
                for position in range(1, end, 2):
                    path = fields[position]
                    write_file(path, fields[position + 1], False)
                path = b""
                self.start(call, fields[end:])
        except ValueError as error:
            self.send(call, FAILED, b"0", path, str(error).encode())
        except OSError as error:
            self.send(call, FAILED, number(error.errno or errno.EIO), path, str(error.strerror).encode())

    # Commands.

    def start(self, call: int, fields: "list[bytes]") -> None:
        """Start a command, or answer at once that it cannot be started.

        Fields: timeout in ms, output limit in bytes, "1" for a channel, cwd, stdin, number of arguments, arguments,
        then names and values of the environment.
        """
        timeout, limit, channel, cwd, stdin, count = fields[:6]
        argv = fields[6 : 6 + int(count)]
        rest = fields[6 + int(count) :]
        env = dict(zip(rest[::2], rest[1::2], strict=True))
        env[MARK] = number(call)
        started = time.monotonic()
        try:
            posix.chdir(cwd)
        except OSError as error:
            self.refuse(call, 126, b"cannot start in " + cwd, error)
            return
        try:
            program = find_program(argv[0], env.get(b"PATH", b"/usr/bin:/bin"))
        except OSError as error:
            self.refuse(call, 127 if error.errno == errno.ENOENT else 126, argv[0], error)
            return
        pipes = [posix.pipe() for _ in range(3 if channel == b"1" else 2)]
        source = self.stdin(stdin)
        actions: list[tuple[int, ...]] = [(posix.POSIX_SPAWN_DUP2, source, 0)]
        actions += [(posix.POSIX_SPAWN_DUP2, write, target + 1) for target, (_, write) in enumerate(pipes)]
        try:
            pid, note = self.spawn(program, argv, env, actions)
        except OSError as error:
            for read, write in pipes:
                posix.close(read)
                posix.close(write)
            self.refuse(call, 127 if error.errno == errno.ENOENT else 126, argv[0], error)
            return
        finally:
            posix.close(source)
        command = Command(call, pid, started, started + int(timeout) / 1000)
        for position, (read, write) in enumerate(pipes):
            posix.close(write)
            posix.set_blocking(read, False)
            sink = Sink(CHANNEL_BYTES, whole=True) if position == 2 else Sink(int(limit))
            command.streams.append((read, sink))
            self.readers[read] = sink
            self.poll.register(read, select.POLLIN)
        command.streams[1][1].add(note)
        self.commands[pid] = command

    def stdin(self, data: bytes) -> int:
        """A descriptor to read `data` from."""
        if not data:
            return posix.open(b"/dev/null", posix.O_RDONLY)
        descriptor = posix.memfd_create("stdin")
        write_all(descriptor, data)
        posix.lseek(descriptor, 0, 0)
        return descriptor

    def spawn(
        self, program: bytes, argv: "list[bytes]", env: "dict[bytes, bytes]", actions: "list[tuple[int, ...]]"
    ) -> "tuple[int, bytes]":
        """Start a process in a session of its own; returns it and a note for its stderr.

        When earlier commands left so many processes behind that no more fit, and no other command runs, those are
        ended first.
        """
        defaults = [_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGCHLD]
        note = b""
        for attempt in range(3):
            try:
                pid = posix.posix_spawn(
                    program, argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=defaults
                )
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOMEM) or self.commands or attempt == 2:
                    raise
                self.kill_all()
                note = b"sandbox: the process or memory limit was reached; background processes were ended\n"
            else:
                return pid, note
        raise OSError(errno.EAGAIN, "no process could be started")

    def refuse(self, call: int, code: int, what: bytes, error: OSError) -> None:
        """Answer for a command that was not started."""
        text = what + b": " + str(error.strerror).encode() + b"\n"
        self.send(call, DONE, number(code), b"0", b"0", b"0", b"0", b"", text, b"")

    def drain(self, descriptor: int, most: int) -> None:
        """Read what a pipe holds, at most about `most` bytes; forget it at its end."""
        sink = self.readers[descriptor]
        try:
            while most > 0:
                data = posix.read(descriptor, CHUNK)
                if not data:
                    self.poll.unregister(descriptor)
                    del self.readers[descriptor]
                    posix.close(descriptor)
                    return
                most -= len(data)
                if sink is not None:
                    sink.add(data)
        except BlockingIOError:
            pass

    def reap(self) -> None:
        """Collect every process that ended, ours or an orphan; answer for commands."""
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self.commands.pop(pid, None)
            if command is not None:
                self.finish(command, status)

    def finish(self, command: Command, status: int) -> None:
        """Answer for a command whose process ended. What it left behind may write on; that is read and dropped."""
        code = posix.waitstatus_to_exitcode(status)
        code = KILLED if command.timed_out else (128 - code if code < 0 else code)
        wall = int((time.monotonic() - command.started) * 1_000_000)
        kept = []
        for descriptor, sink in command.streams:
            if self.readers.get(descriptor) is sink:
                self.drain(descriptor, CHUNK << 4)
            if descriptor in self.readers and self.readers[descriptor] is sink:
                self.readers[descriptor] = None
            kept.append(sink.kept())
        kept += [b""] * (3 - len(kept))
        dropped = [number(sink.dropped) for _, sink in command.streams[:2]]
        late = b"1" if command.timed_out else b"0"
        self.send(command.call, DONE, number(code), *dropped, late, number(wall), *kept)

    def expire(self) -> None:
        """End every command whose time is over, and everything it started."""
        now = time.monotonic()
        for command in list(self.commands.values()):
            if command.deadline <= now and command.pid in self.commands:
                command.timed_out = True
                self.kill_tree(command)

    def cancel(self, call: int) -> None:
        """End one command because nobody waits for it."""
        for command in list(self.commands.values()):
            if command.call == call:
                command.timed_out = True
                self.kill_tree(command)

    def kill_tree(self, command: Command) -> None:
        """Kill a command and all that it started, daemons included.

        If no other command runs, all else in the sandbox is killed. Otherwise all but the other commands, their
        descendants and what carries their mark or the mark of a finished command.
        """
        if len(self.commands) == 1:
            self.kill_all()
            return
        for _ in range(20):
            victims = self.victims(command)
            for pid in victims:
                kill(pid)
            self.reap()
            if not victims:
                return
            time.sleep(0.001)

    def victims(self, command: Command) -> "list[int]":
        """The live processes that are not known to belong to another command."""
        parents = {}
        for name in posix.listdir("/proc"):
            if name.isdigit() and name != "1":
                stat = read_quietly(f"/proc/{name}/stat").rpartition(b")")[2].split()
                if len(stat) > 1 and stat[0] not in (b"Z", b"X"):
                    parents[int(name)] = int(stat[1])
        own = MARK + b"=" + number(command.call)
        victims = []
        for pid in parents:
            root = pid
            while root not in self.commands and parents.get(root, 1) != 1:
                root = parents[root]
            if root in self.commands:
                if root == command.pid:
                    victims.append(pid)
                continue
            marks = [item for item in read_quietly(f"/proc/{pid}/environ").split(b"\0") if item.startswith(MARK + b"=")]
            if not marks or own in marks:
                victims.append(pid)
        return victims

    def kill_all(self) -> None:
        """Kill all processes but this one, and wait for their ends (at most 5 s)."""
        give_up = time.monotonic() + 5
        while time.monotonic() < give_up:
            kill(-1)
            self.reap()
            if not has_children():
                return
            time.sleep(0.0005)


def kill(pid: int) -> None:
    """SIGKILL, unless it is gone."""
    try:
        posix.kill(pid, _signal.SIGKILL)
    except ProcessLookupError:
        pass


def has_children() -> bool:
    """Whether any child, running or not, is left."""
    try:
        posix.waitid(posix.P_ALL, 0, posix.WEXITED | posix.WNOHANG | posix.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def find_program(name: bytes, path: bytes) -> bytes:
    """The file that `name` means under a search path; a name with a slash is itself.

    Raises:
        OSError: ENOENT if there is none.
    """
    if b"/" in name:
        return name
    for directory in path.split(b":"):
        candidate = directory + b"/" + name
        if directory and posix.access(candidate, posix.X_OK) and posix.stat(candidate).st_mode & KIND == REGULAR:
            return candidate
    raise FileNotFoundError(errno.ENOENT, "command not found")


def read_quietly(path: str) -> bytes:
    """At most a megabyte of a /proc file; nothing if it cannot be read."""
    try:
        descriptor = posix.open(path, posix.O_RDONLY)
    except OSError:
        return b""
    try:
        return posix.read(descriptor, 1 << 20)
    except OSError:
        return b""
    finally:
        posix.close(descriptor)


def read_file(path: bytes, most: int) -> bytes:
    """A regular file's bytes.

    Raises:
        OSError: as the kernel says; EISDIR for a directory.
        ValueError: larger than `most`, or no regular file.
    """
    descriptor = posix.open(path, posix.O_RDONLY | posix.O_NONBLOCK | posix.O_NOCTTY)
    try:
        state = posix.fstat(descriptor)
        if state.st_mode & KIND == DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        if state.st_mode & KIND != REGULAR:
            raise ValueError("is not a regular file")
        if state.st_size > most:
            raise ValueError(f"has {state.st_size} bytes, more than the {most} asked for")
        parts = []
        size = 0
        while data := posix.read(descriptor, max(CHUNK, state.st_size - size + 1)):
            parts.append(data)
            size += len(data)
            if size > most:
                raise ValueError(f"has more than the {most} bytes asked for")
        return b"".join(parts)
    finally:
        posix.close(descriptor)


def write_file(path: bytes, data: bytes, executable: bool) -> None:
    """Write a whole file; parents are made."""
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NONBLOCK | posix.O_NOCTTY
    mode = 0o755 if executable else 0o644
    try:
        descriptor = posix.open(path, flags, mode)
    except FileNotFoundError:
        make_parents(path)
        descriptor = posix.open(path, flags, mode)
    try:
        write_all(descriptor, data)
        if executable:
            posix.fchmod(descriptor, posix.fstat(descriptor).st_mode & 0o7777 | 0o111)
    finally:
        posix.close(descriptor)


def make_parents(path: bytes) -> None:
    """Make the directories above a path."""
    at = 1
    while (at := path.find(b"/", at) + 1) > 0:
        try:
            posix.mkdir(path[: at - 1], 0o755)
        except FileExistsError:
            pass
        except OSError:
            if not posix.access(path[: at - 1], posix.F_OK):
                raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte."""
    with memoryview(data) as view:
        at = 0
        while at < len(view):
            at += posix.write(descriptor, view[at:])


def libc(name: str, *arguments: "int | bytes") -> None:
    """Call a C function that gives 0 on success. (`ctypes` itself, and `resource`, cost milliseconds to import.)"""
    function = _ctypes.dlsym(_ctypes.dlopen(None, 2), name)  # type: ignore[arg-type]
    if _ctypes.call_function(function, arguments) != 0:
        raise OSError(f"{name}{arguments} failed")


def hide_memory() -> None:
    """Make this process not dumpable: no process of the sandbox can open its memory through /proc."""
    libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(arguments: "list[str]") -> None:
    """Set the resource limits given as number=value."""
    for argument in arguments:
        resource, _, value = argument.partition("=")
        libc("setrlimit", int(resource), int(value).to_bytes(8, sys.byteorder) * 2)


def serve(limits: "list[str]") -> None:
    """Serve on descriptor 3 until the supervisor is gone, with resource limits given as number=value; no return."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # as for any process 1, the kernel then drops it
    hide_memory()
    limit(limits)
    null = posix.open(b"/dev/null", posix.O_RDWR)
    for target in (0, 1, 2):
        posix.dup2(null, target)
    posix.close(null)
    posix.umask(0o022)
    Server().run()
    posix._exit(0)  # without the interpreter's own clearing up, which takes milliseconds


if __name__ == "__main__":
    serve(sys.argv[1:])
