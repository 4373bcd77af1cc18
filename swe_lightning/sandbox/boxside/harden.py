"""Runs once, as root, while an image is hardened: takes out what an agent must not find, whatever distribution it is.

Gone afterwards: every `.git`, every program of git (by name, by hard link, by content), package caches and credentials
in home directories, set-user-id bits, and the image's own copy of the tree (boxes get an export of it). Added: the
box's user and the places where the tree goes.
"""

import json
import os
import re
import stat
import sys

SKIP = {"/proc", "/sys", "/dev", "/opt/swel"}
PROGRAM_DIRS = {"bin", "sbin", "libexec", "games"}
GIT = re.compile(r"git(-.*)?|scalar|gitk")
SIGNATURE = b"GIT_INDEX_FILE"
HOME_SECRETS = (
    *(".cache", ".ssh", ".netrc", ".gitconfig", ".git-credentials", ".pypirc", ".aws", ".docker", ".kube", ".pip"),
    *(".config/gh", ".config/pip", ".bash_history", ".python_history", ".wget-hsts", ".local/share/keyrings"),
)


def main() -> None:
    """The settings are the one argument, as JSON; says on stdout what was removed."""
    print("hardened " + json.dumps(harden(json.loads(sys.argv[1]))))


def harden(settings: dict) -> dict:
    removed: list[str] = []
    programs: set[tuple[int, int]] = set()
    suspects: list[tuple[tuple[int, int], str]] = []
    for folder, names, files in os.walk("/", followlinks=False):
        names[:] = [n for n in names if os.path.join(folder, n) not in SKIP]
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            if name in (".git", "git-core"):
                names[:] = [n for n in names if n != name]
                programs |= _inodes(path)
                removed.append(path)
            elif name in files:
                _look(path, name, os.path.basename(folder), programs, suspects, removed)
    removed += [path for inode, path in suspects if inode in programs]
    for home in ["/root", *_below("/home"), "/tmp", "/var/cache"]:
        removed += [p for p in (os.path.join(home, s) for s in [*HOME_SECRETS, "pip"]) if os.path.lexists(p)]
    for path in removed:
        remove(path)
    _places(settings["tree"], settings["original"])
    _user(settings["uid"])
    _open_up(settings["path"])
    return {"removed": sorted(set(removed))[:1000]}


def _look(path, name, folder, programs, suspects, removed) -> None:
    try:
        info = os.lstat(path)
    except OSError:
        return
    if stat.S_ISLNK(info.st_mode):
        if folder in PROGRAM_DIRS and GIT.fullmatch(name):
            removed.append(path)
        return
    if not stat.S_ISREG(info.st_mode):
        return
    if info.st_mode & 0o6000:
        os.chmod(path, stat.S_IMODE(info.st_mode) & ~0o6000)
    if not info.st_mode & 0o111:
        return
    inode = (info.st_dev, info.st_ino)
    suspects.append((inode, path))
    if folder in PROGRAM_DIRS and (GIT.fullmatch(name) or (info.st_size > 1 << 19 and _holds(path, SIGNATURE))):
        programs.add(inode)


def _holds(path, needle) -> bool:
    with open(path, "rb") as f:
        before = b""
        while part := f.read(1 << 20):
            if needle in before + part:
                return True
            before = part[-len(needle) :]
    return False


def _inodes(path) -> set:
    """Of the programs below `path`: their hard links elsewhere go too."""
    found = set()
    for folder, _, files in os.walk(path):
        for name in files:
            info = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(info.st_mode) and info.st_mode & 0o111 and GIT.fullmatch(name):
                found.add((info.st_dev, info.st_ino))
    return found


def _places(tree, original) -> None:
    for path in (tree, original):
        remove(path)
        os.makedirs(path)
    remove("/var/tmp")
    os.makedirs("/var", exist_ok=True)
    os.symlink("/tmp", "/var/tmp")
    os.makedirs("/tmp", exist_ok=True)


def _user(uid) -> None:
    for path, line in (("/etc/passwd", f"swel:x:{uid}:{uid}:swel:/tmp:/bin/bash"), ("/etc/group", f"swel:x:{uid}:")):
        text = ""
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="surrogateescape") as f:
                text = "".join(line for line in f if not line.startswith("swel:"))
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as f:
            f.write(text + ("" if not text or text.endswith("\n") else "\n") + line + "\n")


def _open_up(path_variable) -> None:
    """Programs on the PATH may lie below directories that only root could enter (/root/miniconda3)."""
    for directory in path_variable.split(":"):
        while len(directory) > 1:
            if os.path.isdir(directory):
                mode = stat.S_IMODE(os.stat(directory).st_mode)
                if mode & 0o5 != 0o5:
                    os.chmod(directory, mode | 0o55)
            directory = os.path.dirname(directory)


def _below(directory) -> list:
    return [os.path.join(directory, n) for n in os.listdir(directory)] if os.path.isdir(directory) else []


def remove(path) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for name in os.listdir(path):
            remove(os.path.join(path, name))
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)
