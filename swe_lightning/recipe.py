"""A recipe: one YAML file that describes one experiment, completely.

Strict: an unknown key is an error with a suggestion, and every cross-check that would refuse a run later is made here,
so `--dry-run` finds it. Values resolve in this order: defaults below, the file, `--set a.b=c`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swe_lightning.errors import RecipeError
from swe_lightning.services import parse_service

ENGINE_OWNS = {
    *("strategy", "seed", "use_remove_padding", "use_dynamic_bsz"),
    *("max_token_len_per_gpu", "infer_max_token_len_per_gpu", "micro_batch_size_per_gpu"),
    *("lr", "lr_warmup_steps", "lr_warmup_steps_ratio", "betas", "weight_decay", "clip_grad", "grad_clip"),
    "total_training_steps",
}
"""verl's options that follow from the recipe's own keys, or that our engine replaces."""
BUILTIN_DIR = Path(__file__).resolve().parent.parent / "recipes"


class Section(BaseModel):
    """Base of all sections: no unknown keys, validated defaults, field docstrings in the schema."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)


S = TypeVar("S", bound=Section)


class Tasks(Section):
    train: Path
    """JSONL of training tasks."""
    val: Path
    """JSONL of held-out tasks; never overlaps `train`."""


class Model(Section):
    path: str | None = None
    """Hugging Face name or local directory of the initial policy; left out where `warm_start` makes one."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's chat template (prefix-preserving ones merge better)."""
    max_context: int = Field(81920, ge=16)
    """Tokens of prompt + response the engine accepts."""


class WarmStart(Section):
    """Supervised start of a tiny policy on scripted demonstrations, where no pretrained model fits the machine."""

    demonstrations: int = Field(6000, ge=1)
    """Demonstrations played against the fast stand-in for the shell."""
    real_demonstrations: int = Field(64, ge=0)
    """Further demonstrations played through gateway, harness and sandbox on training tasks."""
    steps: int = Field(600, ge=1)
    """Optimizer steps."""
    lr: float = Field(0.02, gt=0)
    """Peak learning rate of Muon (matrices); AdamW (embeddings, norms) gets 0.15 of it."""
    batch_tokens: int = Field(4096, ge=64)
    """Tokens per optimizer step."""
    layers: int = Field(3, ge=1)
    hidden: int = Field(128, ge=32)
    vocab: int = Field(1024, ge=300)


class Harness(Section):
    kind: Literal["mini_swe_agent"] = "mini_swe_agent"
    step_limit: int = Field(100, ge=1)
    """Model calls per rollout."""
    command_timeout_s: float = Field(120, gt=0)
    """Wall time of one command in the sandbox."""
    max_tokens: int = Field(12288, ge=1)
    """Sampled tokens per call."""
    observation_chars: int = Field(6000, ge=1)
    """Characters of command output shown to the model."""
    format_error_limit: int = Field(3, ge=0)
    """Consecutive replies without a command before the rollout ends as format_errors; 0 = no limit."""
    system_template: str | None = None
    """Jinja; default: our text-mode prompt, which never mentions git."""
    instance_template: str | None = None
    """Jinja over the task's columns."""
    observation_template: str | None = None
    """Jinja over `output`."""
    format_error_template: str | None = None
    agent_env: dict[str, str] = Field(default_factory=dict)
    """Variables of the agent's shell; values are Jinja over the task's columns."""
    agent_files: dict[str, str] = Field(default_factory=dict)
    """Files put into the agent's tree (Jinja over the task's columns); part of the base, never of the model patch."""


class KubernetesSection(Section):
    """Boxes as pods. Which cluster: KUBECONFIG, else the one this process is a pod of, else ~/.kube/config."""

    context: str | None = None
    """Context of the kubeconfig; default: its current one."""
    namespace: str | None = None
    """Default: the context's, or this pod's, or `default`. One that holds nothing else is best."""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """Never: the nodes were given the hardened images by hand."""
    image_pull_secret: str | None = None
    """Secret with the registry's credentials, in that namespace."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes boxes may run on."""
    tolerations: list[dict[str, str | int]] = Field(default_factory=list)
    """Taints boxes may be scheduled in spite of, as Kubernetes writes them."""
    runtime_class: str | None = None
    """RuntimeClass of a sandboxed runtime (gVisor, Kata), if the nodes have one."""
    user_namespaces: bool = False
    """Boxes in user namespaces (hostUsers: false); the nodes must support it (Kubernetes 1.33, recent runtime)."""
    cpu_request: float = Field(0.1, gt=0)
    """Cores the scheduler sets aside for a box; sandbox.cpu is its limit."""
    memory_request_mb: int = Field(256, ge=1)
    """MiB the scheduler sets aside for a box; sandbox.memory_mb is its limit."""
    start_timeout_s: float = Field(300, gt=0)
    """From a box's request to its first command: scheduling, image pull, start."""
    max_lifetime_s: int = Field(21_600, ge=60)
    """The cluster ends a box after so many seconds in any case (activeDeadlineSeconds)."""


class SandboxSection(Section):
    backend: Literal["local", "docker", "kubernetes"] = "local"
    image_registry: str | None = None
    """Prefix put before image names that tasks give (docker, kubernetes)."""
    image: str | None = None
    """Image of tasks that name none (docker, kubernetes): bash, Python and what the tests import."""
    start_limit: int = Field(8, ge=1)
    """Boxes that are being started from this machine at once (docker, kubernetes); a daemon fails under more."""
    kubernetes: KubernetesSection = Field(default_factory=KubernetesSection)
    cpu: float = Field(1, gt=0)
    """CPU cores of one sandbox."""
    memory_mb: int = Field(6144, ge=64)
    pids: int = Field(512, ge=16)
    disk_mb: int = Field(4096, ge=16)
    """Bytes the agent may write, tree and /tmp together."""
    keep: Path | None = None
    """Debugging: leave the tree of every box (rollouts, gradings), as it was at its end, in this directory."""
    whitelist: list[str] = Field(default_factory=list)
    """Services (host:port) that agent and tests may reach; everything else stays out of reach. Default: none."""
    show_tests: bool = False
    """True: the agent's tree keeps the failing tests (they are restored before grading all the same)."""
    remember_commands: str | None = None
    """Regex of whole commands whose effect on a tree is deterministic; such a command is executed once per tree state
    and replayed afterwards. Training only; a command that does not match makes the rest of the rollout real."""
    memo_dir: Path | None = None
    """Where remembered commands and verdicts lie; default: the run directory. Runs over the same tasks may share it."""

    @field_validator("whitelist")
    @classmethod
    def _are_services(cls, value: list[str]) -> list[str]:
        for text in value:
            parse_service(text)
        return value

    @field_validator("remember_commands")
    @classmethod
    def _is_a_regex(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _remembers_no_service(self) -> SandboxSection:
        if self.remember_commands and self.whitelist:
            raise ValueError(
                "what a whitelisted service answers does not follow from the tree; leave out remember_commands"
            )
        return self


class Rollouts(Section):
    groups_per_step: int = Field(16, ge=1)
    """Tasks (prompts) per optimizer batch."""
    group_size: int = Field(8, ge=1)
    """Rollouts per task."""
    timeout_s: float = Field(5400, gt=0)
    """Wall time of one rollout, grading excluded."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    schedule: Literal["sync", "async"] = "sync"
    active_groups: int = Field(32, ge=1)
    """Groups in flight (async)."""
    max_staleness: int = Field(0, ge=0)
    """Weight updates between the first token of a group and its use."""
    max_attempts: int = Field(3, ge=1)
    """Attempts after infrastructure failures before the rollout leaves the batch."""
    workers: int = Field(2, ge=1)
    """Harness worker processes (local)."""
    concurrency: int = Field(32, ge=1)
    """Rollouts per worker process at once."""


class OffPolicy(Section):
    kind: Literal["none", "tis", "mask"] = "tis"
    """tis: truncated importance sampling; mask: tokens outside [1/cap, cap] leave the loss."""
    level: Literal["token", "sequence"] = "token"
    cap: float = Field(2.0, gt=1)


class Algorithm(Section):
    advantage: Literal["grpo", "grpo_no_std", "rloo", "reinforce_baseline"] = "grpo"
    normalisation: Literal["rollout_token_mean", "token_mean", "sample_mean", "constant"] = "rollout_token_mean"
    policy_loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the penalty towards the initial policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k3: never negative, low variance; k2: half the squared log ratio; k1: the log ratio (as a penalty it only
    shows the KL: its expected gradient is zero)."""
    entropy_coef: float = Field(0.0, ge=0)
    constant_tokens: int = Field(4096, ge=1)
    """Tokens per rollout that normalisation constant divides by."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ppo_clip and gspo loss where the advantage is negative, in multiples of it; null = no bound."""
    min_group: int = Field(2, ge=1)
    """Graded members a group needs."""
    skip_zero_variance: bool = False
    """True: groups without any advantage (equal rewards, too few graded) leave the batch, so that R counts only
    rollouts that teach something; under reinforce_baseline a group of equal rewards away from the mean stays."""
    duplicate_calls: Literal["supersede", "keep"] = "supersede"
    off_policy: OffPolicy = OffPolicy()
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted over the batch, so that they carry no information."""


class Training(Section):
    lr: float = Field(1e-6, gt=0)
    lr_warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    steps: int = Field(1000, ge=1)
    """Schedule steps: one batch of groups each."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per batch, each over whole groups."""
    micro_batch_tokens: int = Field(16384, ge=16)
    """Tokens per forward pass, padding included."""
    prompt_limit: int = Field(65536, ge=1)
    """Tokens of a row before its first sampled one; a row with more leaves the batch, counted."""
    response_limit: int = Field(65536, ge=1)
    """Tokens of a row from its first sampled one on; what is beyond is cut off, counted."""
    over_limit: Literal["cut", "drop_rollout"] = "cut"
    """cut: a rollout over a limit stays with what fits (counted as partial); drop_rollout: it leaves whole."""
    save_every: int = Field(16, ge=1)
    keep_checkpoints: int = Field(0, ge=0)
    """0 keeps all; otherwise the newest N beside the first."""
    eval_every: int = Field(16, ge=0)
    """Steps between validations; 0 = never."""
    engine: Literal["embedded", "verl"] = "embedded"
    """embedded: verl TrainingWorker in process, world size 1; verl: Ray worker groups."""
    engine_options: dict[str, bool | int | float | str | None] = {}
    """Further options of verl's own configuration by dotted name (engine.param_offload: true). Refused: what the recipe
    sets itself, and what would normalise advantages or losses a second time."""
    gpus: int = Field(0, ge=0)
    threads: int = Field(1, ge=1)
    """CPU threads of the training worker and of the embedded inference server."""
    seed: int = 0

    @field_validator("engine_options")
    @classmethod
    def _backend_leaves_our_numbers_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_second_normalisation(value)
        for key in value:
            section, _, name = key.partition(".")
            if section not in ("engine", "optimizer") or not name:
                raise ValueError(f"no option {key}: names start with engine. or optimizer.")
            if name in ENGINE_OWNS:
                raise ValueError(f"{key} follows from the recipe's own keys; remove it")
        return value


def refuse_second_normalisation(engine: Mapping[str, Any]) -> None:
    """ValueError when a training backend's own option would normalise what is already folded into the weights."""
    switches = ("norm_adv_by_std_in_grpo", "normalize_advantages", "whiten_advantages", "use_kl_in_reward")
    for key, value in engine.items():
        name = key.rsplit(".", 1)[-1]
        if name in switches and value:
            raise ValueError(
                f"{key} is on, but advantages are normalised once already (algorithm.advantage); turn it off"
            )
        if name == "loss_agg_mode" and value not in (None, "sum"):
            raise ValueError(f"{key} {value} would average again; algorithm.normalisation is folded into the weights")


class Grading(Section):
    timeout_s: float = Field(300, gt=0)
    """Wall time of the test command."""
    remember_verdicts: bool = False
    """Grade each distinct (task, filtered patch) once per run; right where tests are deterministic."""
    tests: Literal["listed", "fail_to_pass_files", "all"] = "listed"
    """listed: the files that hold a FAIL_TO_PASS or PASS_TO_PASS test; fail_to_pass_files: only those that hold a
    FAIL_TO_PASS test, and the PASS_TO_PASS tests elsewhere do not count; all: whatever the test command collects."""


class Reward(Section):
    """Shaping of the training reward of solved rollouts; validation and every rate use the raw verdict."""

    turn_penalty: float = Field(0.0, ge=0, le=1)
    """Taken off at harness.step_limit model calls, in proportion from free_turns on; 0 = off."""
    free_turns: int = Field(80, ge=0)
    context_penalty: float = Field(0.0, ge=0, le=1)
    """Taken off where the longest prompt has full_context_tokens, in proportion from free_context_tokens on."""
    free_context_tokens: int = Field(50_000, ge=0)
    full_context_tokens: int = Field(64_000, ge=1)

    @property
    def active(self) -> bool:
        return self.turn_penalty > 0 or self.context_penalty > 0

    @model_validator(mode="after")
    def _ramps(self) -> Reward:
        if self.free_context_tokens >= self.full_context_tokens:
            raise ValueError("reward.free_context_tokens must be below reward.full_context_tokens")
        return self


class Evaluation(Section):
    temperature: float = Field(0.7, ge=0)
    samples: int = Field(1, ge=1)
    """Rollouts per task."""
    limit: int | None = Field(None, ge=1)
    """Only the first N validation tasks (seeded order), for validation during training."""


class Wandb(Section):
    enabled: bool = False
    project: str = "swe-lightning"
    mode: Literal["offline", "online"] = "offline"


class Recipe(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    store: str | None = None
    """postgresql://USER@HOST/DATABASE of the run's store; null = SQLite in the run directory. The password comes from
    PGPASSWORD or a passfile, never from here."""
    tasks: Tasks
    model: Model
    warm_start: WarmStart | None = None
    harness: Harness = Harness()
    sandbox: SandboxSection = SandboxSection()
    rollout: Rollouts = Rollouts()
    algorithm: Algorithm = Algorithm()
    training: Training = Training()
    grading: Grading = Grading()
    reward: Reward = Reward()
    evaluation: Evaluation = Evaluation()
    wandb: Wandb = Wandb()

    @field_validator("store")
    @classmethod
    def _is_a_database_without_password(cls, value: str | None) -> str | None:
        return None if value is None else checked_store(value)

    @model_validator(mode="after")
    def _cross_checks(self) -> Recipe:
        r, a, t = self.rollout, self.algorithm, self.training
        if (self.model.path is None) == (self.warm_start is None):
            raise ValueError("give either model.path or a warm_start section, not both and not neither")
        if r.top_p < 1:
            raise ValueError("rollout.top_p < 1 biases every importance ratio in training; set it to 1")
        if r.schedule == "async" and a.off_policy.kind == "none":
            raise ValueError(
                "rollout.schedule async needs a named correction: set algorithm.off_policy.kind to tis or mask"
            )
        if r.schedule == "sync" and r.max_staleness:
            raise ValueError("rollout.max_staleness has no meaning with rollout.schedule sync; remove it or use async")
        if r.group_size < a.min_group:
            raise ValueError(
                f"rollout.group_size {r.group_size} is below algorithm.min_group {a.min_group}: no group could be used"
            )
        if r.groups_per_step % t.mini_batches:
            raise ValueError(
                f"training.mini_batches {t.mini_batches} does not divide rollout.groups_per_step {r.groups_per_step}"
            )
        return self


def checked_store(url: str) -> str:
    """`url` if it names a PostgreSQL database and holds no secret; ValueError that does not repeat it otherwise."""
    try:
        parts = urlsplit(url)
        names_a_database = parts.scheme == "postgresql" and len(parts.path) > 1 and parts.port != 0
    except ValueError:
        names_a_database = False
    if not names_a_database:
        raise ValueError(
            "is no URL of a database; give postgresql://USER@HOST/DATABASE, or leave it out for SQLite in the run"
        )
    if parts.password or "password" in parse_qs(parts.query):
        raise ValueError("holds a password, which the run's files would show; set PGPASSWORD or use ~/.pgpass")
    return url


def missing_engine(recipe: Recipe) -> str | None:
    """One sentence that says what this version cannot run yet of a valid recipe, or None."""
    if recipe.training.engine == "verl":
        return (
            "training.engine verl (Ray worker groups, vLLM servers) is not part of this version; "
            "use training.engine embedded"
        )
    if recipe.model.chat_template is not None:
        return (
            "model.chat_template is not part of this version; put chat_template.jinja into the model directory instead"
        )
    if recipe.rollout.schedule == "async":
        return "rollout.schedule async is not part of this version; use rollout.schedule sync"
    return None


def find_recipe(name: str) -> tuple[Path, bool]:
    """The file `name` in the working directory, else the built-in recipe of that name; True = built-in."""
    path = Path(name)
    if path.is_file():
        return path, False
    for candidate in (BUILTIN_DIR / path.name, BUILTIN_DIR / f"{path.name}.yaml"):
        if candidate.is_file():
            return candidate, True
    known = ", ".join(sorted(p.name for p in BUILTIN_DIR.glob("*.yaml")))
    raise RecipeError(f"no recipe {name}: not a file here and not built in (built in: {known})")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read, override, validate. Raises RecipeError with one sentence per fault."""
    path, _ = find_recipe(name)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} must hold a mapping of sections (name, tasks, model, ...)")
    for override in overrides or []:
        _apply_override(data, override)
    return validate_recipe(data, str(path))


def validate_recipe(data: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_explain(e) for e in error.errors())) from error


def validated(kind: type[S], data: dict[str, Any], where: str) -> S:
    """One section from values of the command line."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_explain(e) for e in error.errors())) from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, eq, raw = override.partition("=")
    if not eq or not key:
        raise RecipeError(f"--set {override}: write it as section.key=value")
    parts = key.split(".")
    fields, node = Recipe.model_fields, data
    for depth, part in enumerate(parts):
        if part not in fields:
            raise RecipeError(f"--set {override}: no key {'.'.join(parts[: depth + 1])}{_suggest(part, fields)}")
        if depth == len(parts) - 1:
            break
        section = _section_of(fields[part].annotation)
        if section is None:
            raise RecipeError(f"--set {override}: {'.'.join(parts[: depth + 1])} is a value, not a section")
        fields = section.model_fields
        child = node.get(part)
        if not isinstance(child, dict):
            child = {}
            node[part] = child
        node = child
    try:
        node[parts[-1]] = yaml.safe_load(raw)
    except yaml.YAMLError:  # a template such as {{ x }}: meant as text
        node[parts[-1]] = raw


def _section_of(annotation: Any) -> type[Section] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _explain(error: Any) -> str:
    location = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        parent = Recipe.model_fields
        for part in error["loc"][:-1]:
            section = _section_of(parent[part].annotation) if part in parent else None
            parent = section.model_fields if section else {}
        return f"unknown key {location}{_suggest(str(error['loc'][-1]), parent)}"
    if error["type"] == "missing":
        return f"{location} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if location == "store":  # what was refused may hold a password
        return f"store {message}"
    return f"{location}: {message} (got {error['input']!r})" if location else message


def _suggest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else f" (known: {', '.join(known)})"
