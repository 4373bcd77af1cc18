"""The command server: process 1 of a box, a single stdlib-only file started inside it.

As process 1 it cannot be killed or stopped from within, its end is the end of every process in the box, and
`kill(-1)` reaches everything but itself. It speaks length-prefixed frames over one inherited socket with the trusted
side; when that socket closes, it exits. It is not dumpable, so the commands it runs (same user) cannot open its memory.

It trusts the frames and nothing else. Only cheap modules are imported: start-up is most of what a box costs.
"""

import os
import sys
from struct import pack as _pack
from struct import unpack_from as _unpack_from
from time import monotonic

OK, FAILED = b"+", b"-"


def pack(*fields: bytes) -> bytes:
    """One frame: total length, then each field with its length."""
    body = b"".join(_pack("!I", len(f)) + f for f in fields)
    return _pack("!I", len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        (n,) = _unpack_from("!I", body, at)
        fields.append(body[at + 4 : at + 4 + n])
        at += 4 + n
    return fields


class Output:
    """Keeps the beginning and the end of a stream within `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.tail_limit + 65536:
            del self.tail[: len(self.tail) - self.tail_limit]

    def result(self) -> tuple[bytes, bool]:
        lost = self.total - self.head_limit - self.tail_limit
        if lost <= 0:
            return bytes(self.head + self.tail), False
        mark = b"\n[... %d bytes left out ...]\n" % lost
        tail = self.tail[len(self.tail) - self.tail_limit :]
        return bytes(self.head + mark + tail), True


class Server:
    def __init__(self, fd: int) -> None:
        import _signal as signal
        import _socket
        import select

        self.signal, self.select = signal, select
        self.sock = _socket.socket(fileno=fd)
        os.set_inheritable(fd, False)
        os.closerange(fd + 1, 1024)  # nothing of the launcher's may reach a command
        self.oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        self.oom_base = os.read(self.oom_fd, 32)
        _prctl(4, 0)  # PR_SET_DUMPABLE: closes /proc/1/mem, /proc/1/fd and ptrace to the commands
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything else is ignored for process 1 by the kernel
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        self.env: dict[bytes, bytes] = {}
        self.output_limit, self.watch_bytes = 1_000_000, 0
        self.main_pid, self.main_status = 0, -1
        self.pidfd = os.pidfd_open(os.getpid())
        self.sock.sendmsg([pack(OK)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, _pack("i", self.pidfd))])
        os.close(self.pidfd)
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)

    # -- frames

    def receive(self) -> list[bytes]:
        (length,) = _unpack_from("!I", self._exactly(4))
        return unpack(self._exactly(length))

    def _exactly(self, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            part = self.sock.recv(min(n - len(data), 1 << 20))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def serve(self) -> None:
        poll = self.select.poll()
        poll.register(self.sock.fileno(), self.select.POLLIN)
        poll.register(self.wake, self.select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self.wake in ready:
                self._reap()
            if self.sock.fileno() in ready:
                kind, *fields = self.receive()
                try:
                    reply = getattr(self, "on_" + kind.decode())(fields)
                except OSError as error:
                    reply = pack(FAILED, str(error.errno or 5).encode(), str(error).encode(errors="surrogateescape"))
                except (MemoryError, ValueError) as error:
                    reply = pack(FAILED, b"22", repr(error).encode(errors="replace"))
                self.sock.sendall(reply)

    # -- requests

    def on_init(self, fields: list[bytes]) -> bytes:
        import resource

        settings = dict(f.split(b"=", 1) for f in fields[:-1])
        self.env = _mapping(unpack(fields[-1]))
        self.output_limit = int(settings.pop(b"output_bytes"))
        self.watch_bytes = int(settings.pop(b"watch_bytes"))
        for name, value in settings.items():
            kind, wanted = getattr(resource, "RLIMIT_" + name.decode()), int(value)
            _, hard = resource.getrlimit(kind)
            wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (wanted, wanted))
        return pack(OK)

    def on_run(self, fields: list[bytes]) -> bytes:
        timeout, command, extra = float(fields[0]), fields[1], _mapping(unpack(fields[2]))
        started = monotonic()
        out = Output(self.output_limit)
        read_end = self._spawn(command, {**self.env, **extra}, out)
        timed_out = False
        try:
            if read_end >= 0:
                timed_out = self._collect(read_end, out, started + timeout)
        finally:
            if read_end >= 0:
                os.close(read_end)
        output, truncated = out.result()
        status = self.main_status
        code = 124 if timed_out else status
        flags = (b"t" if timed_out else b"") + (b"c" if truncated else b"")
        return pack(OK, str(code).encode(), flags, output)

    def on_read(self, fields: list[bytes]) -> bytes:
        fd = os.open(fields[0], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info, limit = os.fstat(fd), int(fields[1])
            if info.st_mode & 0o170000 != 0o100000:
                raise OSError(22, "not a regular file")
            data = bytearray()
            while part := os.read(fd, 1 << 20):
                data += part
                if len(data) > limit:
                    raise OSError(27, "file too large")
        finally:
            os.close(fd)
        return pack(OK, bytes(data))

    def on_write(self, fields: list[bytes]) -> bytes:
        for at in range(0, len(fields), 3):
            path, mode, data = fields[at : at + 3]
            _remove(path)
            if mode == b"x":
                continue
            parent = os.path.dirname(path)
            if parent and not os.path.isdir(parent):
                _make_parents(parent)
            if mode == b"l":
                os.symlink(data, path)
                continue
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fchmod(fd, int(mode, 8))
            finally:
                os.close(fd)
        return pack(OK)

    # -- processes

    def _spawn(self, command: bytes, env: dict[bytes, bytes], out: Output) -> int:
        """Start bash as its own session; its output's read end, or -1 when it could not start."""
        if len(command) <= 100_000:
            return self._spawn_argv([b"bash", b"-c", command], env, out)
        script = os.memfd_create("command", 0)  # one argument may hold 128 KiB; longer scripts come through a file
        try:
            os.write(script, command)
            return self._spawn_argv([b"bash", b"/dev/fd/%d" % script], env, out)
        finally:
            os.close(script)

    def _spawn_argv(self, argv: list[bytes], env: dict[bytes, bytes], out: Output) -> int:
        for last_try in (False, True):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            try:
                os.pwrite(self.oom_fd, b"1000", 0)  # out of memory takes a command, not the server
                self.main_status = -1
                self.main_pid = os.posix_spawn(
                    b"/bin/bash",
                    argv,
                    env,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, write_end, 1),
                        (os.POSIX_SPAWN_DUP2, write_end, 2),
                    ],
                    setsid=True,
                    setsigdef=[self.signal.SIGINT, self.signal.SIGPIPE, self.signal.SIGXFSZ, self.signal.SIGCHLD],
                    setsigmask=[],
                )
                os.set_blocking(read_end, False)
                return read_end
            except (OSError, ValueError) as error:
                os.close(read_end)
                if last_try or not isinstance(error, OSError) or error.errno not in (11, 12):
                    out.add(b"bash: cannot run the command: " + str(error).encode(errors="replace") + b"\n")
                    self.main_status = 126
                    return -1
                self._kill_all()  # earlier commands left too many processes behind
            finally:
                os.close(write_end)
                os.pwrite(self.oom_fd, self.oom_base, 0)
        return -1

    def _collect(self, read_end: int, out: Output, deadline: float) -> bool:
        """Gather output until bash ends (False) or the deadline passes and everything is killed (True)."""
        poll = self.select.poll()
        poll.register(read_end, self.select.POLLIN)
        poll.register(self.wake, self.select.POLLIN)
        poll.register(self.sock.fileno(), self.select.POLLHUP | self.select.POLLRDHUP)
        while self.main_status < 0:
            left = deadline - monotonic()
            if left <= 0:
                self._kill_all()
                self._drain(read_end, out)
                return True
            wait = min(left, 0.1) if self.watch_bytes else left
            for fd, _ in poll.poll(wait * 1000 + 1):
                if fd == self.wake:
                    self._reap()
                elif fd == read_end:
                    try:
                        data = os.read(read_end, 1 << 16)
                    except BlockingIOError:
                        continue
                    if data:
                        out.add(data)
                    else:
                        poll.unregister(read_end)
                else:
                    os._exit(0)  # the trusted side is gone
            if self.watch_bytes and _resident() > self.watch_bytes:
                out.add(b"\nout of memory: the sandbox's memory limit was reached, its processes were killed\n")
                self._kill_all()
        self._drain(read_end, out)
        return False

    def _drain(self, read_end: int, out: Output) -> None:
        """What is in the pipe now; processes that still run in the background are not waited for."""
        until = monotonic() + 0.2
        while monotonic() < until:
            try:
                data = os.read(read_end, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            out.add(data)

    def _kill_all(self) -> None:
        """Everything in the box but this process; waits until it is gone, at most two seconds."""
        until = monotonic() + 2
        while monotonic() < until:
            try:
                os.kill(-1, self.signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not self._reap():
                return
            poll = self.select.poll()
            poll.register(self.wake, self.select.POLLIN)
            poll.poll(20)

    def _reap(self) -> bool:
        """Collect ended processes (orphans too: this is process 1). True while some are alive."""
        try:
            while os.read(self.wake, 512):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.main_pid:
                code = os.waitstatus_to_exitcode(status)
                self.main_status = code if code >= 0 else 128 - code


def _mapping(fields: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(fields[::2], fields[1::2], strict=True))


def _remove(path: bytes) -> None:
    """Whatever lies at `path`, without following links."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            for name in os.listdir(path):
                _remove(path + b"/" + name)
            os.rmdir(path)
        else:
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def _make_parents(path: bytes) -> None:
    """Directories down to `path`; a file or a dangling link in the way is replaced."""
    done = b""
    for part in path.split(b"/"):
        done = done + b"/" + part if done else part
        if not os.path.isdir(done):
            _remove(done)
            os.mkdir(done, 0o755)


def _resident() -> int:
    """Bytes of anonymous and shared memory that the box's processes hold (used where no cgroup counts them)."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                fd = os.open(f"/proc/{name}/status", os.O_RDONLY)
            except OSError:
                continue
            try:
                text = os.read(fd, 8192)
            except OSError:
                text = b""
            os.close(fd)
            for key in (b"RssAnon:", b"RssShmem:"):
                at = text.find(key)
                if at >= 0:
                    total += int(text[at + len(key) :].split(None, 1)[0]) * 1024
    return total


def _prctl(option: int, value: int) -> None:
    """ctypes costs more than the rest of the start; its C core alone does not."""
    try:
        import _ctypes

        address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
        result = _ctypes.call_function(address, (option, value, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        result = ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    if result:
        raise OSError("prctl failed")


if __name__ == "__main__":
    Server(int(sys.argv[1])).serve()
