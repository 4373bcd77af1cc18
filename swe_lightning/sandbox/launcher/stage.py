"""The stage: one world-searchable directory, seen by no other process, that holds all a box may see of the host.

Built once per launcher. The server's modules are compiled here, once, instead of in every box.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
from typing import Any

from .kernel import CLONE_NEWNS, CLONE_NEWUSER, MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC, call, mount


def enter_namespaces(own_user_namespace: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWNS | (CLONE_NEWUSER if own_user_namespace else 0)
    call("unshare", flags)
    if own_user_namespace:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
    mount("", "/", flags=MS_REC | MS_PRIVATE)


def build_stage(stage: str, plan: dict[str, Any]) -> None:
    """Collect under one world-searchable directory all that boxes see of the host."""
    os.umask(0o022)
    mount("stage", stage, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=755")
    for name in ("box", "empty", "lib"):
        os.mkdir(f"{stage}/{name}")
    open(f"{stage}/nothing", "w").close()
    for name, text in plan["texts"].items():
        path = f"{stage}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(text.encode("latin-1"))
    for name, target in plan["links"].items():
        os.makedirs(os.path.dirname(f"{stage}/{name}"), exist_ok=True)
        os.symlink(target, f"{stage}/{name}")
    for name, source in plan["copies"].items():
        with open(source, "rb") as f:
            data = f.read()
        path = f"{stage}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
        os.chmod(path, 0o755)
    compile_package(plan["boxside"], f"{stage}/lib/boxside")
    for name, source in plan["binds"].items():
        os.makedirs(f"{stage}/{name}", exist_ok=True)
        mount(source, f"{stage}/{name}", flags=MS_BIND | MS_REC)


def compile_package(source: str, target: str) -> None:
    """The modules of one directory as .pyc alone: Python imports them without looking for sources or writing caches."""
    os.mkdir(target)
    for name in os.listdir(source):
        if name.endswith(".py"):
            with open(f"{source}/{name}", "rb") as f:
                code = compile(f.read(), f"/run/box/boxside/{name}", "exec")
            with open(f"{target}/{name}c", "wb") as f:
                f.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
