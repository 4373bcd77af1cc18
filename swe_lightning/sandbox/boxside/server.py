"""The command server: process 1 of a box.

As process 1 it cannot be killed or stopped from within, its end is the end of every process in the box. It speaks
frames over one inherited socket with the trusted side; when that socket closes, it exits. It is not dumpable, so the
commands it runs (same user) cannot open its memory.

It trusts the frames and nothing else. Only cheap modules are imported: start-up is most of what a box costs.
"""

import _signal as signal
import _socket
import os
import select
from struct import pack as _pack
from struct import unpack_from as _unpack_from

from . import files
from .commands import Commands
from .kernel import keep_proc_closed, prctl
from .wire import FAILED, OK, mapping, over, pack, unpack

PR_SET_DUMPABLE = 4


class Server:
    def __init__(self, sock) -> None:
        """`sock`: a connected socket, or anything with its fileno, recv and sendall."""
        self.sock = sock
        self.commands = Commands()
        prctl(PR_SET_DUMPABLE, 0)  # closes /proc/1/mem, /proc/1/fd and ptrace to the commands
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything else is ignored for process 1 by the kernel
        self.env: dict[bytes, bytes] = {}
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)

    @classmethod
    def over(cls, fd: int) -> "Server":
        """On an inherited socket; its owner first gets a handle of this process."""
        sock = _socket.socket(fileno=fd)
        os.set_inheritable(fd, False)
        os.closerange(fd + 1, 1024)  # nothing of the launcher's may reach a command
        server = cls(sock)
        pidfd = os.pidfd_open(os.getpid())
        sock.sendmsg([pack(OK)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, _pack("i", pidfd))])
        os.close(pidfd)
        return server

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        poll.register(self.commands.wake, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self.commands.wake in ready:
                self.commands.reap()
            if self.sock.fileno() in ready:
                kind, *fields = self._receive()
                try:
                    reply = pack(OK, *getattr(self, "on_" + kind.decode())(fields))
                except OSError as error:
                    reply = pack(FAILED, str(error.errno or 5).encode(), str(error).encode(errors="surrogateescape"))
                except Exception as error:  # whatever a command prepared: a server that ends would be a box lost
                    reply = pack(FAILED, b"22", repr(error).encode(errors="replace"))
                self.sock.sendall(reply)

    # -- requests: the fields of each are those of its method, in order; the reply is a list of fields

    def on_init(self, fields: list[bytes]) -> list[bytes]:
        """`NAME=value` settings, then the environment of every command."""
        import resource

        settings = dict(f.split(b"=", 1) for f in fields[:-1])
        self.env = mapping(fields[-1])
        self.commands.output_limit = int(settings.pop(b"output_bytes"))
        self.commands.watch_bytes = int(settings.pop(b"watch_bytes"))
        for name, value in settings.items():
            kind, wanted = getattr(resource, "RLIMIT_" + name.decode()), int(value)
            _, hard = resource.getrlimit(kind)
            wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (wanted, wanted))
        keep_proc_closed()
        return []

    def on_run(self, fields: list[bytes]) -> list[bytes]:
        """Timeout in seconds, command, further environment -> exit code, flags (t timed out, c cut), output."""
        env = over(self.env, mapping(fields[2]))
        code, timed_out, output, cut = self.commands.run(fields[1], env, float(fields[0]), self.sock.fileno())
        return [str(code).encode(), (b"t" if timed_out else b"") + (b"c" if cut else b""), output]

    def on_read(self, fields: list[bytes]) -> list[bytes]:
        """Path, limit in bytes -> content."""
        return [files.read(fields[0], int(fields[1]))]

    def on_write(self, fields: list[bytes]) -> list[bytes]:
        """(path, mode, data) repeated."""
        for at in range(0, len(fields), 3):
            files.write(*fields[at : at + 3])
        return []

    def _receive(self) -> list[bytes]:
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
