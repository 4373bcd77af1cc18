"""The tree an agent sees, and the tree grading starts from: exported from the task's repository, without history.

Blobs are read as they are stored: `.gitattributes` cannot leave files out or rewrite them on the way. Exports are named
by git's own tree hash, so equal trees are exported once, and an export is either complete or absent. The only
addition is what a build from git would have generated (versions.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from swe_lightning import paths
from swe_lightning.errors import DataError, MissingPart
from swe_lightning.records import Task
from swe_lightning.sandbox.image_names import task_image
from swe_lightning.sandbox.versions import generated_files

TIP_SUBJECT = "Remove F2P Tests"
BUG_SUBJECT = "Bug Patch"


def agent_tree(task: Task, *, show_tests: bool) -> Path:
    """What the agent works on: the buggy code, with the failing tests only if `show_tests`. Read-only for callers."""
    return _export(task, tip=not show_tests)


def pristine_tree(task: Task) -> Path:
    """What grading starts from: the buggy code with all tests. Read-only for callers."""
    return _export(task, tip=False)


def _export(task: Task, *, tip: bool) -> Path:
    repository, built, key = _repository(task)
    if task.test_patch is not None:
        return export_tree(repository, _base_tree(repository, task), built, key)
    commits = _commits(repository, task.instance_id)
    return export_tree(repository, commits[0 if tip else 1], built, key)


def _base_tree(repository: Path, task: Task) -> str:
    """SWE-bench rows start from their base commit, where the tests of their test patch are not there yet."""
    if not task.base_commit:
        raise DataError(f"task {task.instance_id} has a test patch but no base_commit to apply it to")
    done = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{task.base_commit}^{{tree}}")
    if done.returncode:
        raise DataError(f"task {task.instance_id}: no commit {task.base_commit} in {repository}")
    return done.stdout.decode().strip()


def export_tree(repository: Path, tree: str, built: Path | None = None, key: str = "") -> Path:
    """The directory that holds git's tree object `tree`; made on first use, by one process. `built`: files of the
    image with this key that lie beside the tracked ones.
    """
    place = paths.home() / "trees"
    place.mkdir(exist_ok=True)
    name = f"{tree}-{key}" if key else tree
    target = place / name
    if target.is_dir():
        return target
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            temporary = Path(tempfile.mkdtemp(dir=place, prefix=f".{name}."))
            try:
                _write_tree(repository, tree, temporary)
                if built is not None:
                    _lay_beside(built, temporary)
                for path, text in generated_files(temporary).items():
                    (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                    _write(os.fsencode(temporary / path), b"100644", text.encode())
                _open_directories(temporary)
                temporary.chmod(0o755)
                os.rename(temporary, target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        with contextlib.suppress(OSError):
            (place / f"{name}.lock").unlink()
    return target


def _repository(task: Task) -> tuple[Path, Path | None, str]:
    """(repository, files built beside its tree, key of the image they come from): the task's own, else its image's."""
    if not task.repo_path:
        image = task_image(task)
        if not image:
            raise MissingPart(
                f"task {task.instance_id} has no repo_path and names no image: its repository cannot be found"
            )
        from swe_lightning.sandbox.image_trees import checkout

        found = checkout(image)
        return found.repository, found.built, found.key
    path = Path(task.repo_path)
    if not path.is_dir():
        raise DataError(f"task {task.instance_id}: no repository at {path}")
    return path, None, ""


def _lay_beside(built: Path, target: Path) -> None:
    """Never over a tracked file, nor through a link of the tree."""
    for source in sorted(built.rglob("*")):
        place = target / source.relative_to(built)
        if source.is_file() and not os.path.lexists(place) and place.parent.resolve().is_relative_to(target.resolve()):
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
            place.chmod(0o644)


def _commits(repository: Path, instance_id: str) -> tuple[str, str]:
    """Tree hashes of the branch's tip and of the commit before it, whose subjects must be the expected ones."""
    ref = f"refs/heads/{instance_id}"
    done = _git(repository, "log", "-2", "--first-parent", "--format=%T %s", ref, "--")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise DataError(f"task {instance_id}: no branch {instance_id} in {repository} ({said})")
    lines = [line.split(" ", 1) for line in done.stdout.decode(errors="replace").splitlines()]
    if [line[1] for line in lines] != [TIP_SUBJECT, BUG_SUBJECT]:
        raise DataError(
            f"task {instance_id}: branch {instance_id} in {repository} must end in the commits "
            f"'{BUG_SUBJECT}' and '{TIP_SUBJECT}'"
        )
    return lines[0][0], lines[1][0]


def _write_tree(repository: Path, tree: str, target: Path) -> None:
    listing = _git(repository, "ls-tree", "-r", "-z", "--full-tree", tree)
    if listing.returncode:
        raise DataError(f"cannot read tree {tree} of {repository}: {listing.stderr.decode(errors='replace').strip()}")
    entries = []
    for line in listing.stdout.split(b"\0"):
        if line:
            head, _, name = line.partition(b"\t")
            mode, kind, blob = head.split(b" ")
            if kind == b"blob":  # a submodule has no content here
                entries.append((mode, blob, name))
    if any(b".git" in name.lower().split(b"/") for _, _, name in entries):
        raise DataError(f"tree {tree} of {repository} holds a .git entry; such a repository cannot be used")
    wanted = b"".join(blob + b"\n" for _, blob, _ in entries)
    blobs = _git(repository, "cat-file", "--batch", feed=wanted)
    if blobs.returncode:
        raise DataError(f"cannot read blobs of {repository}: {blobs.stderr.decode(errors='replace').strip()}")
    at, data, made = 0, blobs.stdout, set()
    for mode, _, name in entries:
        end = data.index(b"\n", at)
        said = data[at:end].split(b" ")
        if said[-1] == b"missing":
            raise DataError(f"{repository} is damaged: it does not hold blob {said[0].decode()} of tree {tree}")
        size = int(said[2])
        content = data[end + 1 : end + 1 + size]
        at = end + 1 + size + 1
        path = os.path.join(os.fsencode(target), name)
        parent = os.path.dirname(path)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        _write(path, mode, content)


def _open_directories(target: Path) -> None:
    """Whatever the umask: boxes run as somebody else."""
    for directory in target.rglob("*"):
        if directory.is_dir() and not directory.is_symlink():
            directory.chmod(0o755)


def _write(path: bytes, mode: bytes, content: bytes) -> None:
    if mode == b"120000":
        os.symlink(content, path)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(content)
        os.fchmod(fd, 0o755 if mode == b"100755" else 0o644)


def _git(repository: Path, *arguments: str, feed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """git with no configuration but its own, no prompts, on a repository that may belong to somebody else."""
    git = shutil.which("git")
    if not git:
        raise MissingPart("git is needed to read task repositories: install your distribution's package git")
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/nonexistent", "LC_ALL": "C"}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1"}
    argv = [git, "-c", "safe.directory=*", "-C", str(repository), *arguments]
    return subprocess.run(argv, input=feed, capture_output=True, env=env, check=False)
