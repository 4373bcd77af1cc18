"""The tree seen from outside: diff, write, read_file, extra files. Exact for every kind of change git could record."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from swe_lightning.sandbox import Backend, FileState, Sandbox, TreeDiff


def changed(box: Sandbox, command: str) -> TreeDiff:
    result = box.run(command, timeout_s=20)
    assert result.exit_code == 0, result.output
    return box.diff()


def test_a_fresh_box_differs_in_nothing(box: Sandbox) -> None:
    assert box.diff() == {}


CHANGES: dict[str, tuple[str, TreeDiff]] = {
    "edit": ("sed -i s/1/9/ pkg/a.py", {"pkg/a.py": FileState(b"x = 9\n")}),
    "add": ("mkdir -p n/m; printf 'a\\0b' >n/m/f", {"n/m/f": FileState(b"a\0b")}),
    "empty file": (": >empty", {"empty": FileState(b"")}),
    "delete": ("rm pkg/deep/c.py", {"pkg/deep/c.py": None}),
    "make executable": ("chmod +x pkg/a.py", {"pkg/a.py": FileState(b"x = 1\n", 0o755)}),
    "make not executable": ("chmod -x run.sh", {"run.sh": FileState(b"echo ran\n", 0o644)}),
    "symlink": ("ln -s /etc/passwd s", {"s": FileState(b"/etc/passwd", 0o777, symlink=True)}),
    "retarget": ("ln -sfn pkg/b.py link", {"link": FileState(b"pkg/b.py", 0o777, symlink=True)}),
    "through a link": ("echo more >>link", {"pkg/a.py": FileState(b"x = 1\nmore\n")}),
    "link to file": ("rm link; echo f >link", {"link": FileState(b"f\n")}),
    "rename": ("mv pkg/a.py pkg/r.py", {"pkg/a.py": None, "pkg/r.py": FileState(b"x = 1\n")}),
    "rename directory": (
        "mv pkg/deep moved",
        {
            "pkg/deep/c.py": None,
            "pkg/deep/er/d.py": None,
            "moved/c.py": FileState(b"z = 3\n"),
            "moved/er/d.py": FileState(b"w = 4\n"),
        },
    ),
    "delete directory": ("rm -r pkg/deep", {"pkg/deep/c.py": None, "pkg/deep/er/d.py": None}),
    "replace directory": (
        "rm -r pkg/deep; mkdir pkg/deep; echo n >pkg/deep/n; mkdir pkg/deep/er; echo e >pkg/deep/er/e",
        {
            "pkg/deep/c.py": None,
            "pkg/deep/er/d.py": None,
            "pkg/deep/n": FileState(b"n\n"),
            "pkg/deep/er/e": FileState(b"e\n"),
        },
    ),
    "replace directory, same files again": (
        "cp -r pkg/deep /tmp/d; rm -r pkg/deep; cp -r /tmp/d pkg/deep; rm pkg/deep/er/d.py",
        {"pkg/deep/er/d.py": None},
    ),
    "directory to file": (
        "rm -r pkg/deep; echo f >pkg/deep",
        {"pkg/deep": FileState(b"f\n"), "pkg/deep/c.py": None, "pkg/deep/er/d.py": None},
    ),
    "directory to link": (
        "rm -r pkg/deep; ln -s /usr pkg/deep",
        {"pkg/deep": FileState(b"/usr", 0o777, symlink=True), "pkg/deep/c.py": None, "pkg/deep/er/d.py": None},
    ),
    "file to directory": ("rm run.sh; mkdir run.sh; echo i >run.sh/i", {"run.sh": None, "run.sh/i": FileState(b"i\n")}),
    "empty directory": ("mkdir -p e/f", {}),
    "touch": ("touch pkg/a.py; chmod 600 pkg/b.py; cp pkg/a.py t; cat t >pkg/a.py; rm t", {}),
    "there and back": ("sed -i s/1/9/ pkg/a.py; sed -i s/9/1/ pkg/a.py; rm pkg/b.py; echo 'y = 2' >pkg/b.py", {}),
    "same size and time": (
        "touch -r pkg/a.py /tmp/t; printf 'x = 7\\n' >pkg/a.py; touch -r /tmp/t pkg/a.py",
        {"pkg/a.py": FileState(b"x = 7\n")},
    ),
    "hard link": (
        "ln pkg/a.py hard; echo h >>hard",
        {"pkg/a.py": FileState(b"x = 1\nh\n"), "hard": FileState(b"x = 1\nh\n")},
    ),
    "unreadable": ("echo s >u; mkdir v; echo s >v/w; chmod 0 u v", {"u": FileState(b"s\n"), "v/w": FileState(b"s\n")}),
    "odd names": (
        "printf 1 >$'new\\nline'; printf 2 >$'not\\xffutf8'; printf 3 >' -rf \"q\" '",
        {"new\nline": FileState(b"1"), "not\udcffutf8": FileState(b"2"), ' -rf "q" ': FileState(b"3")},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_diff_is_exact(box: Sandbox, name: str) -> None:
    command, expected = CHANGES[name]
    assert changed(box, command) == expected
    assert box.left_out == []


@pytest.mark.parametrize("name", CHANGES)
def test_a_diff_written_into_a_fresh_box_is_that_state(backend: Backend, tree: Path, name: str) -> None:
    expected = CHANGES[name][1]
    with backend.create(tree) as box:
        box.write(expected)
        assert box.diff() == expected


def test_the_given_tree_is_never_written_to(backend: Backend, tree: Path) -> None:
    before = snapshot(tree)
    with backend.create(tree, files={"pkg/new.py": b"n"}) as box:
        changed(box, "rm -r pkg/deep; echo q >>pkg/a.py; chmod 600 run.sh; ln -sfn x link; mkdir -p pkg/z")
        box.write({"pkg/b.py": None, "w": FileState(b"w")})
    assert snapshot(tree) == before


def snapshot(tree: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(p): (
            p.lstat().st_mode,
            b"" if p.is_dir() else os.fsencode(p.readlink()) if p.is_symlink() else p.read_bytes(),
        )
        for p in sorted(tree.rglob("*"))
    }


def test_extra_files_are_part_of_the_base(backend: Backend, tree: Path) -> None:
    files = {".orig/pkg/a.py": b"x = 1\n", "pkg/deep/new.py": b"n\n", "pkg/b.py": b"laid over\n"}
    with backend.create(tree, files=files) as box:
        assert box.diff() == {}
        seen = box.run("cat .orig/pkg/a.py pkg/deep/new.py pkg/b.py pkg/deep/c.py", timeout_s=20).output
        assert seen == b"x = 1\nn\nlaid over\nz = 3\n"
        assert changed(box, "rm -r .orig; echo 'y = 2' >pkg/b.py; cp pkg/b.py pkg/deep/new.py") == {
            ".orig/pkg/a.py": None,
            "pkg/b.py": FileState(b"y = 2\n"),
            "pkg/deep/new.py": FileState(b"y = 2\n"),
        }
        assert changed(box, "rm -r pkg; mkdir .orig .orig/pkg; echo 'x = 1' >.orig/pkg/a.py") == {
            f"pkg/{name}": None for name in ("a.py", "b.py", "deep/c.py", "deep/er/d.py", "deep/new.py")
        }


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a//b", "./a", "a/", "a\0b"])
def test_paths_that_leave_the_tree_are_refused(backend: Backend, box: Sandbox, tree: Path, path: str) -> None:
    with pytest.raises(ValueError, match="plain path"):
        box.write({path: FileState(b"x")})
    with pytest.raises(ValueError, match="plain path"):
        backend.create(tree, files={path: b"x"})


def test_read_file_sees_what_the_box_sees(box: Sandbox) -> None:
    box.run("printf 'r\\xff' >/tmp/r; mkfifo /tmp/pipe; head -c 3000000 /dev/zero >big", timeout_s=20)
    assert box.read_file("/tmp/r") == b"r\xff"
    assert box.read_file("link") == b"x = 1\n"
    assert box.read_file("big") == bytes(3_000_000)
    assert b"swel" in box.read_file("/etc/passwd")
    failures: list[tuple[Callable[[], bytes], type[OSError]]] = [
        (lambda: box.read_file("none"), FileNotFoundError),
        (lambda: box.read_file("pkg"), OSError),
        (lambda: box.read_file("/tmp/pipe"), OSError),
        (lambda: box.read_file("/dev/zero"), OSError),
        (lambda: box.read_file("/proc/1/environ"), PermissionError),
    ]
    for read, error in failures:
        with pytest.raises(error):
            read()
    assert box.run("echo alive", timeout_s=20).output == b"alive\n"


def test_a_write_that_fails_leaves_a_working_box(backend: Backend, tree: Path) -> None:
    from swe_lightning.sandbox import Limits

    with backend.create(tree, limits=Limits(disk_mb=4)) as box:
        with pytest.raises(OSError, match=r"(?i)space|large"):
            box.write({"big": FileState(bytes(6 << 20))})
        assert box.run("rm -f big; echo ok", timeout_s=20).output == b"ok\n"


def test_special_files_are_left_out_with_a_note(box: Sandbox) -> None:
    command = "mkfifo p; python -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\"; rm run.sh; mkfifo run.sh"
    assert changed(box, command) == {"run.sh": None}
    assert sorted(note.split(":")[0] for note in box.left_out) == ["p", "run.sh", "s"]


def test_trees_too_deep_or_too_large_do_not_take_the_reader_down(backend: Backend, tree: Path) -> None:
    deep = "import os\nfor i in range(1500):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()"
    sparse = "import os\nfor i in range(40):\n    f = open(f'sparse{i}', 'w'); f.truncate(60 << 20)"
    with backend.create(tree) as box:
        found = changed(box, f'python -c "{deep}"; python -c "{sparse}"; echo k >kept')
        assert found == {"kept": FileState(b"k\n")}
        assert len(box.left_out) == 41


def test_modes_and_owners_of_the_tree_do_not_matter(backend: Backend, tmp_path: Path) -> None:
    """A tree readable only by its owner works, and looks as if the box's user owned it."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "f").write_text("secret\n")
    (private / "f").chmod(0o600)
    with backend.create(private) as box:
        assert changed(box, "cat f; echo more >>f") == {"f": FileState(b"secret\nmore\n")}
        assert stat.S_IMODE((private / "f").stat().st_mode) == 0o600
