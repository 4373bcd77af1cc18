"""Remembered commands: the same answers as a real box, without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from swe_lightning.errors import RecipeError, SandboxLost
from swe_lightning.recipe import SandboxSection
from swe_lightning.sandbox import FileState, Limits, make_backend
from swe_lightning.sandbox.local import LocalBackend, LocalSandbox
from swe_lightning.sandbox.memo import RememberingBackend


@pytest.fixture
def backend(local_backend: LocalBackend) -> LocalBackend:
    """Only local boxes: how they are kept, not what they promise."""
    return local_backend


PATTERN = r"(sed|cat|echo|rm|mkdir|printf|cp|sleep) [^\n]*"


class Counting:
    """A real backend that counts the boxes it makes."""

    def __init__(self, inner: LocalBackend) -> None:
        self.inner = inner
        self.made = 0

    def create(
        self,
        tree: Path,
        *,
        env: Mapping[str, str] = {},
        limits: Limits = Limits(),  # noqa: B008
        label: str = "",
        files: Mapping[str, bytes] = {},
        image: str = "",
    ) -> LocalSandbox:
        self.made += 1
        return self.inner.create(tree, env=env, limits=limits, label=label, files=files, image=image)

    def gc(self, label: str | None = None) -> int:
        return self.inner.gc(label)


@pytest.fixture
def counting(backend: LocalBackend) -> Counting:
    return Counting(backend)


@pytest.fixture
def memo(counting: Counting, tmp_path: Path) -> RememberingBackend:
    return RememberingBackend(counting, PATTERN, tmp_path / "memo")


EPISODE = ["cat pkg/a.py", "sed -i s/1/9/ pkg/a.py; cat pkg/a.py", "cat none", "rm -r pkg/deep", "cat pkg/a.py run.sh"]


def play(backend: RememberingBackend | Counting, tree: Path, commands: list[str]) -> tuple[object, object]:
    with backend.create(tree) as box:
        return [box.run(c, timeout_s=20) for c in commands], box.diff()


def test_replay_equals_the_real_thing_and_needs_no_box(
    memo: RememberingBackend, counting: Counting, tree: Path
) -> None:
    real = play(counting, tree, EPISODE)
    assert counting.made == 1
    assert play(memo, tree, EPISODE) == real
    assert counting.made == 2
    assert play(memo, tree, EPISODE) == real
    assert counting.made == 2
    assert (memo.hits, memo.misses) == (6, 6)  # `a; b` is two commands


def test_other_processes_share_the_memory(
    memo: RememberingBackend, counting: Counting, tree: Path, tmp_path: Path
) -> None:
    first = play(memo, tree, EPISODE)
    again = RememberingBackend(counting, PATTERN, tmp_path / "memo")
    assert play(again, tree, EPISODE) == first
    assert again.misses == 0


def test_two_ways_to_one_tree_share_what_follows(memo: RememberingBackend, counting: Counting, tree: Path) -> None:
    play(memo, tree, ["sed -i s/1/2/ pkg/a.py", "sed -i s/2/9/ pkg/a.py; cat pkg/a.py"])
    (result,), _ = play(memo, tree, ["sed -i s/1/9/ pkg/a.py; cat pkg/a.py"])  # type: ignore[misc]
    assert result.output == b"x = 9\n"
    assert memo.hits == 1  # the cat; the other edit was new


def test_a_command_with_a_part_that_may_not_be_remembered_is_real(
    memo: RememberingBackend, counting: Counting, tree: Path
) -> None:
    with memo.create(tree) as box:
        assert box.run("cd pkg; cat a.py", timeout_s=20).output == b"x = 1\n"
        assert box.run("cat pkg/a.py", timeout_s=20).output == b"x = 1\n"
    assert (memo.hits, memo.misses) == (0, 0)


def test_an_allowed_command_with_more_behind_it_is_real(memo: RememberingBackend, tree: Path) -> None:
    assert memo.steps("cat pkg/a.py") == ["cat pkg/a.py"]
    assert memo.steps("cat a; cat b") == ["cat a", "cat b"]
    assert memo.steps("cat a\ndate") == []
    assert memo.steps("date; cat a") == []


def test_other_limits_are_another_memory(memo: RememberingBackend, tree: Path) -> None:
    for limits in (Limits(memory_mb=256), Limits(memory_mb=512)):
        with memo.create(tree, limits=limits) as box:
            box.run("cat pkg/a.py", timeout_s=20)
    assert (memo.hits, memo.misses) == (0, 2)


def test_who_wants_the_same_at_once_waits_for_one_run(
    memo: RememberingBackend, counting: Counting, tree: Path, tmp_path: Path
) -> None:
    other = RememberingBackend(counting, PATTERN, tmp_path / "memo")  # as another process would have it
    with ThreadPoolExecutor(8) as pool:
        played = [pool.submit(play, (memo, other)[i % 2], tree, ["sleep 0.3", "cat pkg/a.py"]) for i in range(8)]
    assert len({repr(p.result()) for p in played}) == 1
    assert memo.misses + other.misses == 2


def test_a_miss_after_hits_runs_on_the_replayed_state(memo: RememberingBackend, counting: Counting, tree: Path) -> None:
    commands = ["sed -i s/1/9/ pkg/a.py", "rm -r pkg/deep", "mkdir -p n; echo n >n/f"]
    play(memo, tree, commands)
    with memo.create(tree) as box:
        for command in commands:
            box.run(command, timeout_s=20)
        assert counting.made == 1
        assert box.run("echo $(cat pkg/a.py n/f); cat pkg/deep/c.py", timeout_s=20).output.startswith(b"x = 9 n\ncat: ")
        assert counting.made == 2


def test_forks_of_an_episode_keep_their_own_state(memo: RememberingBackend, counting: Counting, tree: Path) -> None:
    """A box left behind at one state is brought to another: edits undone, deleted files back."""
    play(memo, tree, ["rm run.sh", "cat pkg/a.py"])
    with memo.create(tree) as box:
        box.run("echo miss >new", timeout_s=20)  # real box at {new}
        box.write({"new": None, "pkg/a.py": FileState(b"other\n")})  # noted, not yet done
        box.write({"pkg/a.py": FileState(b"x = 1\n")})
        assert box.diff() == {}
        box.run("rm run.sh", timeout_s=20)  # a hit: the box lags behind
        assert box.run("python -c \"import os; print(sorted(os.listdir('.')))\"", timeout_s=20).output == (
            b"['link', 'pkg']\n"
        )
        assert box.diff() == {"run.sh": None}


def test_a_command_outside_the_pattern_makes_the_rest_real(memo: RememberingBackend, tree: Path) -> None:
    commands = ["cat pkg/a.py", "date +%N >stamp", "cat stamp"]
    stamps = set()
    for _ in range(2):
        with memo.create(tree) as box:
            stamps.add([box.run(c, timeout_s=20).output for c in commands][-1])
            assert "stamp" in box.diff()
    assert len(stamps) == 2


def test_state_env_files_and_tree_are_part_of_the_key(memo: RememberingBackend, tree: Path, tmp_path: Path) -> None:
    def output(**settings: Mapping[str, str]) -> bytes:
        with memo.create(tree, **settings) as box:  # type: ignore[arg-type]
            return box.run("echo $V $(cat pkg/a.py extra 2>/dev/null)", timeout_s=20).output

    assert output() == b"x = 1\n"
    assert output(env={"V": "v"}) == b"v x = 1\n"
    assert output(files={"extra": b"e"}) == b"x = 1 e\n"  # type: ignore[dict-item]
    with memo.create(tree) as box:
        assert box.run("echo $V", timeout_s=20, env={"V": "1"}).output == b"1\n"
        assert box.run("echo $V", timeout_s=20, env={"V": "2"}).output == b"2\n"
    other = tmp_path / "other"
    (other / "pkg").mkdir(parents=True)
    (other / "pkg/a.py").write_text("other\n")
    with memo.create(other) as box:
        assert box.run("cat pkg/a.py", timeout_s=20).output == b"other\n"


def test_timeouts_are_never_remembered(memo: RememberingBackend, tree: Path) -> None:
    for _ in range(2):
        with memo.create(tree) as box:
            assert box.run("sleep 9", timeout_s=0.2).timed_out
    assert memo.hits == 0


def test_unusual_bytes_survive(memo: RememberingBackend, tree: Path) -> None:
    command = "printf 'o\\xff\\0' ; printf 'd\\xff\\0' >$'n\\xff\\n'; cp -P link l2"
    first, second = play(memo, tree, [command]), play(memo, tree, [command])
    assert first == second
    assert memo.hits == memo.misses
    assert first[1] == {"n\udcff\n": FileState(b"d\xff\0"), "l2": FileState(b"pkg/a.py", 0o777, symlink=True)}


def test_a_state_that_no_diff_carries_is_not_remembered(memo: RememberingBackend, tree: Path) -> None:
    for _ in range(2):
        with memo.create(tree) as box:
            box.run("mkdir x; mkfifo pipe", timeout_s=20)
            assert b"pipe" in box.run("echo *", timeout_s=20).output
    assert memo.hits == 0


def test_a_destroyed_box_refuses_replays(memo: RememberingBackend, tree: Path) -> None:
    play(memo, tree, EPISODE)
    box = memo.create(tree)
    box.destroy()
    with pytest.raises(SandboxLost):
        box.run(EPISODE[0], timeout_s=20)


def test_make_backend_wraps_only_when_asked(tmp_path: Path) -> None:
    plain, memo = SandboxSection(), SandboxSection(remember_commands="cat .*")
    assert isinstance(make_backend(plain, tmp_path), LocalBackend)
    assert isinstance(make_backend(memo), LocalBackend)
    assert isinstance(make_backend(memo, tmp_path / "m"), RememberingBackend)
    with pytest.raises(ValidationError, match="not a regular expression"):
        SandboxSection(remember_commands="(")
    with pytest.raises(RecipeError, match="remember_commands"):
        RememberingBackend(LocalBackend(), "(", tmp_path / "n")
    assert os.listdir(tmp_path) == ["m"]
