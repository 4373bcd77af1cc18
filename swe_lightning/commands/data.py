"""`swel data ...`: make tasks, clean them, look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Make, clean and inspect task files.", no_args_is_help=True)

Input = Annotated[
    list[str], typer.Option("--input", help="Task file (JSONL, JSON, parquet; gz, zst) or hub data set. Repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Directory for tasks.jsonl and the repositories.")],
    pypi: Annotated[
        list[str] | None, typer.Option(help="Package NAME==VERSION to make training tasks from. Repeatable.")
    ] = None,
    held_out: Annotated[list[str] | None, typer.Option(help="The same, for held-out tasks. Repeatable.")] = None,
    repo: Annotated[Path | None, typer.Option(help="A local git repository to make tasks from.")] = None,
    manifest: Annotated[str | None, typer.Option(help="Manifest of known bugs; `demo` is the built-in one.")] = None,
    write_manifest: Annotated[Path | None, typer.Option(help="Save what was found as a manifest.")] = None,
    tasks_per_package: Annotated[int, typer.Option(min=1, help="Tasks to look for in each package.")] = 20,
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
            kinds=kind or [],
            one_edit=one_edit,
            seed=seed,
            workers=workers,
            timeout_s=timeout_s,
            test_cmd=test_cmd,
            train_limit=train_limit,
            held_out_limit=held_out_limit,
        ),
        as_json,
    )


@app.command("filter")
def filter_tasks(
    inputs: Input,
    out: Annotated[Path, typer.Option(help="Directory for train.jsonl, val.jsonl, dropped.jsonl, report.md.")],
    hub_split: Annotated[str, typer.Option(help="Split to read of a hub data set.")] = "train",
    test_cap: Annotated[int, typer.Option(min=1, help="Most FAIL_TO_PASS + PASS_TO_PASS tests of a task.")] = 200,
    branches: Annotated[Path | None, typer.Option(help="JSON {repository or image: [branches]}.")] = None,
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

    runner = None
    if probe_model:
        from swe_lightning.evaluation.probing import make_prober

        runner = make_prober(probe_recipe, probe_set or [], probe_model, out)
    report = commands.filter(
        inputs=inputs,
        out=out,
        seed=seed,
        hub_split=hub_split,
        test_cap=test_cap,
        branches=branches,
        probe_results=probe_results,
        run_rollouts=runner,
        probe_identity=runner.identity if runner else None,
        k=k,
        keep_none_solved=keep_none_solved,
        split=split,
        val_size=val_size,
        held_out_repos=held_out_repo or [],
        overwrite=overwrite,
    )
    if as_json:
        _print(report, as_json)
        return
    typer.echo((out / "report.md").read_text())


@app.command()
def stats(inputs: Input, as_json: AsJson = False) -> None:
    """Count a task file: repositories, tests per task, issue lengths, kinds of bugs."""
    from data_pipeline import commands

    _print(commands.stats(inputs=inputs), as_json)


@app.command()
def show(instance_id: str, inputs: Input, as_json: AsJson = False) -> None:
    """Show one task."""
    from data_pipeline import commands

    _print(commands.show(inputs=inputs, instance_id=instance_id), as_json)


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
