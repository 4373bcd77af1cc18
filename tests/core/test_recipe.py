"""Recipes: strict, overridable, and refused early with a sentence that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from swe_lightning.errors import RecipeError
from swe_lightning.recipe import BUILTIN_DIR, find_recipe, load_recipe, missing_engine

MINIMAL = {"name": "x", "tasks": {"train": "a.jsonl", "val": "b.jsonl"}, "model": {"path": "m"}}


def write(tmp_path: Path, **sections: object) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **sections}))
    return str(path)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainning": {}}, "unknown key trainning, did you mean training?"),
        ({"rollout": {"group-size": 4}}, "unknown key rollout.group-size, did you mean group_size?"),
        ({"training": {"lr": "fast"}}, "training.lr"),
        ({"training": {"lr": -1}}, "training.lr"),
        ({"rollout": {"top_p": 0.9}}, "top_p"),
        ({"rollout": {"schedule": "async"}, "algorithm": {"off_policy": {"kind": "none"}}}, "named correction"),
        ({"rollout": {"group_size": 1}}, "min_group"),
        ({"rollout": {"groups_per_step": 5}, "training": {"mini_batches": 2}}, "does not divide"),
        ({"rollout": {"max_staleness": 2}}, "no meaning with rollout.schedule sync"),
        ({"warm_start": {}}, "either model.path or a warm_start section"),
        ({"name": "../evil"}, "name"),
        ({"sandbox": {"remember_commands": "(sed"}}, "not a regular expression"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_key(tmp_path: Path, sections: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, **sections))
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lrr=1", "did you mean lr?"),
        ("training.lr", "section.key=value"),
        ("name.x=1", "is a value, not a section"),
        ("nonsense.x=1", "no key nonsense"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words.replace("?", r"\?").replace(".", r"\.")):
        load_recipe(write(tmp_path), [override])


def test_overrides_are_typed_and_reach_nested_sections(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path), ["training.lr=2e-5", "training.steps=7", "algorithm.off_policy.cap=3", "wandb.enabled=true"]
    )
    assert recipe.training.lr == 2e-5
    assert recipe.training.steps == 7
    assert recipe.algorithm.off_policy.cap == 3.0
    assert recipe.wandb.enabled is True


def test_an_override_that_is_not_yaml_is_text(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["harness.instance_template={{ problem_statement }} is to be fixed"])
    assert recipe.harness.instance_template == "{{ problem_statement }} is to be fixed"


def test_null_removes_an_optional_section(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, model={}, warm_start={"steps": 3}), ["warm_start=null", "model.path=somewhere"]
    )
    assert recipe.warm_start is None
    assert recipe.model.path == "somewhere"


@pytest.mark.parametrize("text", ["a: [", "- just\n- a list\n", "\x00"])
def test_a_file_that_is_not_a_recipe(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"r\.yaml"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_a_file_here_wins_over_the_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("recipes/tiny_cpu.yaml") == (BUILTIN_DIR / "tiny_cpu.yaml", True)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny_cpu.yaml").write_text(yaml.safe_dump(MINIMAL))
    assert find_recipe("recipes/tiny_cpu.yaml") == (Path("recipes/tiny_cpu.yaml"), False)
    with pytest.raises(RecipeError, match=r"built in: .*tiny_cpu\.yaml"):
        find_recipe("recipes/none.yaml")


def test_the_paper_recipe_has_the_papers_numbers() -> None:
    recipe = load_recipe("qwen35_9b.yaml")
    assert (recipe.training.lr, recipe.rollout.groups_per_step, recipe.rollout.group_size) == (1e-6, 16, 8)
    assert (recipe.algorithm.clip_low, recipe.algorithm.clip_high, recipe.algorithm.kl_coef) == (0.2, 0.28, 0)
    assert (recipe.model.max_context, recipe.training.prompt_limit, recipe.training.response_limit) == (
        81920,
        65536,
        65536,
    )
    assert (recipe.harness.step_limit, recipe.rollout.timeout_s, recipe.training.save_every) == (100, 5400, 16)
    assert recipe.evaluation.temperature == 0.7
    assert "training.engine verl" in (missing_engine(recipe) or "")


def test_the_tiny_recipe_runs_here() -> None:
    assert missing_engine(load_recipe("tiny_cpu.yaml")) is None


@pytest.mark.parametrize("backend", ["local", "docker", "kubernetes"])
def test_a_whitelist_runs_on_every_backend(backend: str) -> None:
    options = [
        f"sandbox.backend={backend}",
        "sandbox.image=x",
        "sandbox.whitelist=[db.example.org:5432]",
        "sandbox.remember_commands=null",
    ]
    assert missing_engine(load_recipe("tiny_cpu.yaml", options)) is None


def test_every_field_of_the_schema_is_described_or_obvious() -> None:
    from swe_lightning.recipe import Recipe

    schema = json.loads(json.dumps(Recipe.model_json_schema()))
    assert schema["additionalProperties"] is False
    assert "micro_batch_tokens" in schema["$defs"]["Training"]["properties"]
    assert "padding" in schema["$defs"]["Training"]["properties"]["micro_batch_tokens"]["description"]
