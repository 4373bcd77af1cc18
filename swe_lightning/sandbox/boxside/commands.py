"""Run one command at a time with bash: its output bounded, its time bounded, its leftovers collected.

Meant for process 1 of a process namespace, which is what makes two things true: `kill(-1)` reaches everything in the
box but this process, and orphans come here to be reaped. Anywhere else `kill_all` would be a catastrophe: the
constructor refuses.
"""

import _signal as signal  # the public module brings enum along, which costs more than all else here
import os
import select
from time import monotonic, sleep

KILLED_PAUSE_S = 0.2
"""After a command that was killed, perhaps for memory: what it held is freed a moment later than it ends, and until
then the next victim would be this process."""


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


class Commands:
    def __init__(self) -> None:
        if os.getpid() != 1:
            raise RuntimeError("the command server must be process 1 of its own process namespace")
        self.output_limit, self.watch_bytes = 1_000_000, 0
        self.main_pid, self.main_status = 0, -1
        self.oom_fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        self.oom_base = os.read(self.oom_fd, 32)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)

    def run(
        self, command: bytes, env: dict[bytes, bytes], timeout_s: float, owner: int
    ) -> tuple[int, bool, bytes, bool]:
        """(exit code, timed out, output, truncated). `owner`: descriptor whose hang-up ends everything."""
        deadline = monotonic() + timeout_s
        out = Output(self.output_limit)
        timed_out, read_end = False, -1
        try:
            read_end = self._spawn(command, env, out)
            if read_end >= 0:
                timed_out = self._collect(read_end, out, deadline, owner)
        except OSError as error:  # what earlier commands hold leaves no memory for a pipe
            out.add(b"bash: cannot run the command: " + str(error).encode(errors="replace") + b"\n")
            self.main_status = 126
        finally:
            if read_end >= 0:
                os.close(read_end)
        if self.main_status == 128 + signal.SIGKILL:
            sleep(KILLED_PAUSE_S)
        output, truncated = out.result()
        return 124 if timed_out else self.main_status, timed_out, output, truncated

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
                    setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
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
                self.kill_all()  # earlier commands left too many processes behind
            finally:
                os.close(write_end)
                os.pwrite(self.oom_fd, self.oom_base, 0)
        return -1

    def _collect(self, read_end: int, out: Output, deadline: float, owner: int) -> bool:
        """Gather output until bash ends (False) or the deadline passes and everything is killed (True)."""
        poll = select.poll()
        poll.register(read_end, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        poll.register(owner, select.POLLHUP | select.POLLRDHUP)
        while self.main_status < 0:
            left = deadline - monotonic()
            if left <= 0:
                self.kill_all()
                self._drain(read_end, out)
                return True
            wait = min(left, 0.1) if self.watch_bytes else left
            for fd, _ in poll.poll(wait * 1000 + 1):
                if fd == self.wake:
                    self.reap()
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
                self.kill_all()
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

    def kill_all(self) -> None:
        """Everything in the box but this process; waits until it is gone, at most two seconds."""
        until = monotonic() + 2
        while monotonic() < until:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not self.reap():
                return
            poll = select.poll()
            poll.register(self.wake, select.POLLIN)
            poll.poll(20)

    def reap(self) -> bool:
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
