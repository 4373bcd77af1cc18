"""The command server with a Python of its own: one directory that runs on any Linux image of this architecture.

An image may hold Python 3.5, musl or no Python at all, so the server brings its interpreter, that interpreter's shared
libraries and dynamic loader, and the dozen modules it imports, taken from the Python this process runs on. The bundle
is built once per interpreter and server, lies under `home()/bundles`, and becomes `/opt/swel` of hardened images.

It refuses interpreters that do not start from there: that is tried before the bundle appears under its name.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from py_compile import PycInvalidationMode

from swe_lightning import paths
from swe_lightning.errors import MissingPart
from swe_lightning.locks import once
from swe_lightning.sandbox.rootfs import base_python

IN_BOX = "/opt/swel"
LAYOUT = "1"
"""Raise when the way a bundle is built changes."""
MODULES = "os, sys, io, select, resource, struct, time, json, re, _signal, _socket, _ctypes, array"
"""What boxside imports."""
BOXSIDE = Path(__file__).with_name("boxside")


def launch(*arguments: str, root: str = IN_BOX) -> list[str]:
    """The command line that runs the bundle's Python; independent of everything else in the image."""
    return [f"{root}/lib/loader", "--library-path", f"{root}/lib", f"{root}/bin/python", "-I", "-S", "-B", *arguments]


def bundle() -> Path:
    """The directory; its name changes with its content."""
    executable = base_python()[1]
    digest = hashlib.sha256("\n".join([LAYOUT, str(executable), sys.version]).encode())
    for source in sorted(BOXSIDE.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    place = paths.home() / "bundles"
    place.mkdir(exist_ok=True)
    target = place / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    with once(place, target.name):
        if not target.is_dir():
            temporary = Path(tempfile.mkdtemp(dir=place, prefix=".new-"))
            try:
                _build(temporary, executable)
                temporary.chmod(0o755)
                os.rename(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


def _build(root: Path, executable: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = root / "lib" / version
    for directory in (root / "bin", library / "lib-dynload"):
        directory.mkdir(parents=True)
    modules = _module_files(executable)
    for name, source in modules.items():
        extension = source.suffix == ".so"
        target = library / "lib-dynload" / source.name if extension else library / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    shutil.copytree(BOXSIDE, library / "boxside", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(executable, root / "bin/python")
    for name, source in _libraries([executable, *(f for f in modules.values() if f.suffix == ".so")]).items():
        shutil.copyfile(source, root / "lib" / name)
    # Times are lost on the way into an image, and nothing can be compiled there.
    compileall.compile_dir(library, quiet=2, workers=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.parent.name in ("bin", "lib") else 0o644)
    done = subprocess.run(
        [*launch("-c", f"import {MODULES}; print('runs')", root=str(root))], capture_output=True, text=True, env={}
    )
    if done.stdout != "runs\n":
        raise MissingPart(
            f"the Python at {executable} cannot be carried into containers ({done.stderr.strip()[-300:]}); "
            "use a CPython of your distribution or of python.org for swel"
        )


def _module_files(executable: Path) -> dict[str, Path]:
    """Path below lib/pythonX.Y -> file, for every module that importing MODULES loads."""
    script = (
        f"import {MODULES}, encodings.latin_1, encodings.ascii\n"
        "root = os.path.dirname(os.__file__)\n"
        "for m in list(sys.modules.values()):\n"
        "    f = getattr(m, '__file__', None)\n"
        "    if f: print(os.path.relpath(f, root), f, sep='\\t')\n"
    )
    argv = [str(executable), "-I", "-S", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={})
    return {name: Path(path) for name, path in (line.split("\t") for line in done.stdout.splitlines())}


def _libraries(binaries: list[Path]) -> dict[str, Path]:
    """Name -> file of all shared libraries the binaries need, the dynamic loader as `loader`."""
    done = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False)
    found = {Path(p).name: Path(p) for p in re.findall(r"=> (/\S+) \(0x", done.stdout)}
    loaders = re.findall(r"^\s+(/\S+) \(0x", done.stdout, re.M)
    if not loaders:
        raise MissingPart(f"ldd names no dynamic loader for {binaries[0]}: docker sandboxes need a dynamic Python")
    found["loader"] = Path(loaders[0])
    return found
