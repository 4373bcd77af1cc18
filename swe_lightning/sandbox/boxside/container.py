"""The command server as a container's process 1: requests on stdin, replies on stdout, and the tree's keeper.

Where the owner cannot reach into the box's file system (docker, Kubernetes) this side lays the tree and says what
changed; and it loads the system call filter by itself, on top of whatever the container runtime has put in place.
"""

import _socket
import os
from array import array
from struct import pack as _pack

from .kernel import prctl
from .server import Server
from .tree import Tree
from .wire import pack, unpack

PR_SET_SECCOMP, FILTER = 22, 2
BACKLOG = 128


class Pipes:
    """Two pipe ends with the face of a socket."""

    def __init__(self, read_end: int, write_end: int) -> None:
        self.read_end, self.write_end = read_end, write_end

    def fileno(self) -> int:
        return self.read_end

    def recv(self, n: int) -> bytes:
        return os.read(self.read_end, n)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.write_end, view) :]


class ContainerServer(Server):
    def __init__(self, tree: bytes, sock=None) -> None:
        sock = sock or Pipes(os.dup(0), os.dup(1))
        os.umask(0o022)
        super().__init__(sock)
        self.tree = Tree(tree)
        sock.sendall(pack(b"+", b"ready"))

    def on_filter(self, fields: list[bytes]) -> list[bytes]:
        """A BPF program: no later process of the box, this one included, gets rid of it."""
        program = array("B", fields[0])
        prctl(PR_SET_SECCOMP, FILTER, _pack("@HP", len(program) // 8, program.buffer_info()[0]))
        return []

    def on_listen(self, fields: list[bytes]) -> list[bytes]:
        """A Unix socket, then (address, port) repeated: listens on each and hands the descriptors over there."""
        listeners = []
        for at in range(1, len(fields), 2):
            listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            listener.bind((fields[at].decode(), int(fields[at + 1])))
            listener.listen(BACKLOG)
            listeners.append(listener)
        there = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        there.connect(fields[0])
        descriptors = array("i", [listener.fileno() for listener in listeners])
        there.sendmsg([b"+"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
        for sock in (*listeners, there):
            sock.close()
        return []

    def on_lay(self, fields: list[bytes]) -> list[bytes]:
        """Where the original lies."""
        self.tree.lay(fields[0])
        return []

    def on_record(self, fields: list[bytes]) -> list[bytes]:
        self.tree.record()
        return []

    def on_changes(self, fields: list[bytes]) -> list[bytes]:
        return self.tree.changes()

    def on_fetch(self, fields: list[bytes]) -> list[bytes]:
        """(path, offset, length) packed, repeated -> for each: + and the bytes, or - and why not."""
        reply: list[bytes] = []
        for field in fields:
            path, offset, length = unpack(field)
            try:
                reply += [b"+", self.tree.fetch(path, int(offset), int(length))]
            except OSError as error:
                reply += [b"-", str(error).encode(errors="surrogateescape")]
        return reply


def main(tree: str) -> None:
    os.chdir(tree)
    ContainerServer(os.fsencode(tree)).serve()
