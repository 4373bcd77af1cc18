"""`swel data ...`: make tasks, clean them, look at them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Make, clean and inspect task files.", no_args_is_help=True)

Input = Annotated[
    list[str], typer.Option("--input", help="Task file (JSONL, JSON, parquet; gz, zst) or hub data set. Repeatable.")
]
HubSplit = Annotated[
    str | None, typer.Option(help="Split to read of a hub data set; default: where it publishes its tasks.")
]
Timeout = Annotated[float, typer.Option(min=1, help="Wall time of one run of a row's tests.")]
Backend = Annotated[str, typer.Option(help="Sandbox of the test runs: local, docker or kubernetes.")]
Workers = Annotated[int, typer.Option(min=1, help="Test runs at once.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Directory for tasks.jsonl and the repositories.")],
    pypi: Annotated[
        list[str] | None, typer.Option(help="Package NAME==VERSION to make training tasks from. Repeatable.")
    ] = None,
    held_out: Annotated[list[str] | None, typer.Option(help="The same, for held-out tasks. Repeatable.")] = None,
    repo: Annotated[
        str | None, typer.Option(help="A local git repository to make tasks from: PATH, or PATH@REVISION.")
    ] = None,
    manifest: Annotated[str | None, typer.Option(help="Manifest of known bugs; `demo` is the built-in one.")] = None,
    write_manifest: Annotated[Path | None, typer.Option(help="Save what was found as a manifest.")] = None,
    tasks_per_package: Annotated[int, typer.Option(min=1, help="Tasks to look for in each package.")] = 20,
    combinations: Annotated[
        int | None,
        typer.Option(min=0, help="Tasks of two or three bugs at once per package; default: a quarter as many more."),
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only these kinds of bugs. Repeatable.")] = None,
    train_limit: Annotated[
        int | None, typer.Option(min=0, help="Most training tasks of a manifest (packages take turns).")
    ] = None,
    held_out_limit: Annotated[int | None, typer.Option(min=0, help="Most held-out tasks of a manifest.")] = None,
    one_edit: Annotated[bool, typer.Option(help="Only bugs that one simple line edit repairs.")] = False,
    test_cmd: Annotated[str | None, typer.Option(help="Test command of --repo; default: python -m pytest -q.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Test runs at once.")] = 2,
    timeout_s: Annotated[float, typer.Option(min=1, help="Wall time of one test run.")] = 60.0,
    issue_model: Annotated[
        str | None,
        typer.Option(
            help="URL of an OpenAI-compatible server (.../v1) that writes the issue texts; default: a template."
        ),
    ] = None,
    issue_model_name: Annotated[str | None, typer.Option(help="Name of the model there.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other tasks in OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn packages or a repository into SWE-smith-style tasks by injecting bugs, validated by their tests."""
    from data_pipeline import commands
    from data_pipeline.manifest import DEMO_MANIFEST

    chosen = DEMO_MANIFEST if manifest == "demo" else Path(manifest) if manifest else None
    _print(
        commands.synth(
            out=out,
            pypi=pypi or [],
            held_out=held_out or [],
            repo=repo,
            manifest=chosen,
            write_manifest=write_manifest,
            tasks_per_package=tasks_per_package,
            combinations=combinations,
            kinds=kind or [],
            one_edit=one_edit,
            seed=seed,
            workers=workers,
            timeout_s=timeout_s,
            test_cmd=test_cmd,
            train_limit=train_limit,
            held_out_limit=held_out_limit,
            issue_model=_issue_model(issue_model, issue_model_name),
            overwrite=overwrite,
        ),
        as_json,
    )


def _issue_model(url: str | None, name: str | None) -> Any:
    """The key is read from the environment where it is used, and stands on no command line."""
    from swe_lightning.errors import UserError

    if (url is None) != (name is None):
        raise UserError("--issue-model and --issue-model-name belong together: give the URL and the model's name")
    if url is None or name is None:
        return None
    from data_pipeline.issue_model import IssueModel

    return IssueModel(url, name).checked()


@app.command("filter")
def filter_tasks(
    inputs: Input,
    out: Annotated[Path, typer.Option(help="Directory for train.jsonl, val.jsonl, dropped.jsonl, report.md, card.md.")],
    preset: Annotated[str, typer.Option(help="paper: the published recipe. strict: every check.")] = "paper",
    stage: Annotated[list[str] | None, typer.Option(help="Add one stage to the preset. Repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave one stage out. Repeatable.")] = None,
    eval_set: Annotated[
        list[str] | None, typer.Option(help="Evaluation set to keep apart from (file, hub name). Repeatable.")
    ] = None,
    hub_split: HubSplit = None,
    stream: Annotated[bool, typer.Option("--stream", help="Read hub data sets without storing them.")] = False,
    test_cap: Annotated[int, typer.Option(min=1, help="Most FAIL_TO_PASS + PASS_TO_PASS tests of a task.")] = 200,
    branches: Annotated[
        str | None,
        typer.Option(
            help="Where rows without repo_path have their branches: JSON {repository or image: [branches]}, or "
            "`images`: the pulled images themselves."
        ),
    ] = None,
    validate_runs: Annotated[
        int, typer.Option("--validate", min=0, help="Run each row's tests: once without the fix, so often with it.")
    ] = 0,
    timeout_s: Timeout = 300.0,
    backend: Backend = "local",
    workers: Workers = 2,
    split: Annotated[
        str, typer.Option(help="auto (held_out if synth marked roles), stratified, repository, held_out.")
    ] = "auto",
    val_size: Annotated[int | None, typer.Option(min=1, help="Validation tasks.")] = None,
    held_out_repo: Annotated[list[str] | None, typer.Option(help="Repository for validation only.")] = None,
    probe_model: Annotated[
        str | None, typer.Option(help="Run the difficulty probe: a model directory or script:NAME.")
    ] = None,
    probe_recipe: Annotated[str, typer.Option(help="Recipe of the probe's harness and sandbox.")] = "tiny_cpu.yaml",
    probe_set: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key of the probe's recipe.")
    ] = None,
    probe_results: Annotated[Path | None, typer.Option(help="Probe results measured elsewhere.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Probe rollouts per task.")] = 4,
    keep_none_solved: Annotated[
        int, typer.Option(min=0, help="Tasks no rollout solved to keep (seeded sample).")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of split and samples.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another result in OUT.")] = False,
    as_json: AsJson = False,
) -> None:
    """Clean task rows and split them; every row that leaves is in the ledger with its reason."""
    from data_pipeline import commands

    prober = None
    if probe_model:
        from swe_lightning.evaluation.probing import make_prober

        prober = make_prober(probe_recipe, probe_set or [], probe_model, out)
    grade = _grade(backend, timeout_s) if validate_runs or backend != "local" else None
    with _goes_on():
        report = commands.filter(
            inputs=inputs,
            out=out,
            preset=preset,
            stages=stage or [],
            skip=skip or [],
            seed=seed,
            hub_split=hub_split,
            stream=stream,
            test_cap=test_cap,
            eval_set=eval_set or [],
            branches=Path(branches) if branches and branches != "images" else None,
            of_image=_branches_of_image if branches == "images" else None,
            validations=validate_runs,
            grade=grade,
            grade_identity=_identity(backend, timeout_s),
            workers=workers,
            probe_results=probe_results,
            rollouts=prober,
            probe_identity=prober.identity if prober else None,
            k=k,
            keep_none_solved=keep_none_solved,
            split=split,
            val_size=val_size,
            held_out_repos=held_out_repo or [],
            overwrite=overwrite,
            also=[
                *(["--branches", "images"] if branches == "images" else []),
                *(["--timeout-s", f"{timeout_s:g}"] if validate_runs else []),
                *(["--backend", backend] if validate_runs and backend != "local" else []),
            ],
        )
    if as_json:
        _print(report, as_json)
        return
    typer.echo((out / "report.md").read_text())


@app.command()
def validate(
    inputs: Input,
    out: Annotated[Path, typer.Option(help="Directory for tasks.jsonl, dropped.jsonl and every grading.")],
    repeats: Annotated[int, typer.Option(min=1, help="Gradings of each row's fix; all must pass.")] = 3,
    timeout_s: Timeout = 300.0,
    backend: Backend = "local",
    workers: Workers = 2,
    hub_split: HubSplit = None,
    as_json: AsJson = False,
) -> None:
    """Run every row's tests: the null patch must fail all FAIL_TO_PASS, the fix must pass everything each time."""
    from data_pipeline import commands

    with _goes_on():
        report = commands.validate(
            inputs=inputs,
            out=out,
            grade=_grade(backend, timeout_s),
            grade_identity=_identity(backend, timeout_s),
            repeats=repeats,
            workers=workers,
            hub_split=hub_split,
        )
    _print(report, as_json)


@contextmanager
def _goes_on() -> Iterator[None]:
    """Ctrl-C is an answer to give, not an accident: what was finished is kept."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("swel: interrupted; run the same command to go on", err=True)
        raise typer.Exit(130) from None


def _branches_of_image(image: str) -> Any:
    """Names of branches, or why there can be none. An image that was not pulled says nothing about its rows."""
    from sandbox_images import branches
    from swe_lightning.errors import DataError, InfraError, UserError
    from swe_lightning.records import InfraReason

    try:
        return branches(image)
    except DataError as error:  # there is an image, but no repository in it
        return str(error)
    except InfraError as error:
        if error.reason is InfraReason.IMAGE_UNAVAILABLE:
            raise UserError(f"--branches images: {error}") from error
        raise


def _grade(backend: str, timeout_s: float) -> Any:
    """Real gradings in fresh sandboxes; verdicts are not remembered, or a flaky test would never show."""
    from data_pipeline.validate import grade_with
    from swe_lightning.commands.grade import make_grader

    return grade_with(make_grader({"backend": backend}, {"timeout_s": timeout_s}))


def _identity(backend: str, timeout_s: float) -> str:
    """What a grading depends on beside its row; one of another box or time limit is taken anew."""
    from swe_lightning.grading.grade import GRADER_VERSION

    return f"grader {GRADER_VERSION}, {timeout_s:g} s" + ("" if backend == "local" else f", {backend}")


LookInput = Annotated[
    list[str], typer.Option("--input", help="Task file, hub data set, or a directory that swel data wrote. Repeatable.")
]


@app.command()
def stats(inputs: LookInput, as_json: AsJson = False) -> None:
    """Count a task file or an output: repositories, tests per task, issue lengths, kinds of bugs, funnel."""
    from data_pipeline import commands

    counts = commands.stats(inputs=inputs)
    _view(counts, as_json, "stats_view", counts)


@app.command()
def show(instance_id: str, inputs: LookInput, as_json: AsJson = False) -> None:
    """Show one task: issue, patch, tests; or why it left."""
    from data_pipeline import commands

    side, row = commands.find(inputs=inputs, instance_id=instance_id)
    _view(row, as_json, "task_view", side, row)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="Task file, hub data set or output directory.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two task sets: tasks added, removed, moved or changed, what each stage took out. Exit 1: they differ."""
    from data_pipeline import commands

    found = commands.diff(before=before, after=after)
    _view(found, as_json, "diff_view", found)
    if not found["same"]:
        raise typer.Exit(1)


def _view(data: dict[str, Any], as_json: bool, view: str, *parts: Any) -> None:
    if as_json:
        typer.echo(json.dumps(data, indent=2, default=str))
        return
    from rich.console import Console

    from data_pipeline import views

    Console().print(getattr(views, view)(*parts))


def _print(data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(data, indent=2, default=str))
        return
    width = max((len(key) for key in data), default=0)
    for key, value in data.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items()) or "-"
        elif isinstance(value, list):
            value = (
                f"{len(value)}: " + ", ".join(map(str, value[:5])) + (" ..." if len(value) > 5 else "")
                if value
                else "-"
            )
        typer.echo(f"{key:{width}}  {value}")
