"""The engine against transformers itself: same greedy tokens, same log-probs, whatever shares the batch or cache."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swe_lightning.errors import DataError, UserError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from swe_lightning.policy.engine import PREFILL_TOKENS, Engine, Job  # noqa: E402
from swe_lightning.policy.sampling import Sampling, draw  # noqa: E402
from swe_lightning.policy.weights import load_model  # noqa: E402

pytestmark = pytest.mark.train


class Driver:
    """An engine and a plain transformers copy of the same model."""

    def __init__(self, directory: Path, **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.results: queue.Queue[Job] = queue.Queue()
        self.reference = AutoModelForCausalLM.from_pretrained(directory).eval()
        settings = {"max_context": 512, "max_batch": 16, "cache_mb": 64} | options
        self.engine = Engine(
            load_model(directory), deliver=lambda jobs: [self.results.put(j) for j in jobs] and None, **settings
        )

    def run(self, prompts: Sequence[Sequence[int]], n: int = 12, **sampling: Any) -> list[Job]:
        """Submit everything at once; jobs in the order of `prompts`."""
        jobs = [Job(np.array(p, np.int32), n, Sampling(**sampling), frozenset()) for p in prompts]
        for job in jobs:
            self.engine.submit(job)
        for _ in jobs:
            done = self.results.get(timeout=60)
            assert not done.error, done.error
        return jobs

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        out = self.reference.generate(
            torch.tensor([list(prompt)]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        ids: list[int] = out[0, len(prompt) :].tolist()
        return ids

    def logprobs(self, job: Job, temperature: float = 1.0) -> np.ndarray:
        """By one fresh forward pass over the whole sequence."""
        ids = torch.tensor([[*job.prompt.tolist(), *job.ids]])
        with torch.no_grad():
            table = torch.log_softmax(self.reference(ids).logits[0].double() / temperature, -1)
        at = len(job.prompt) - 1
        return np.array([table[at + i, token].item() for i, token in enumerate(job.ids)])


def prompts(count: int, low: int, high: int, seed: int = 0, vocabulary: int = 500) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, vocabulary) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.fixture
def driver(tiny_dir: Path) -> Iterator[Driver]:
    d = Driver(tiny_dir)
    yield d
    d.engine.close()


def test_greedy_is_what_transformers_generates_for_ragged_prompts(driver: Driver) -> None:
    asked = prompts(24, 1, 90)
    for prompt, job in zip(asked, driver.run(asked, temperature=0.0), strict=True):
        assert job.ids == driver.greedy(prompt, 12)
        assert job.finish == "length"
        np.testing.assert_allclose(job.logprobs, driver.logprobs(job), atol=1e-4)


def test_a_llama_is_served_as_exactly(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    d = Driver(tmp_path, max_context=256)
    asked = prompts(6, 3, 60, seed=3)
    for prompt, job in zip(asked, d.run(asked, temperature=0.0), strict=True):
        assert job.ids == d.greedy(prompt, 12)
    d.engine.close()


def test_later_turns_reuse_what_is_stored_and_stay_exact(driver: Driver) -> None:
    histories = prompts(10, 20, 40, seed=1)
    for turn in range(4):
        for i, job in enumerate(driver.run(histories, n=7, temperature=0.8)):
            np.testing.assert_allclose(job.logprobs, driver.logprobs(job, 0.8), atol=1e-4)
            # All but the last sampled token of the previous turn is already computed.
            assert job.reused == (len(histories[i]) - 6 if turn else 0)
            histories[i] = [*histories[i], *job.ids, *prompts(1, 5, 5, seed=turn)[0]]


def test_rollouts_of_a_group_compute_their_common_prompt_once(driver: Driver) -> None:
    prompt = prompts(1, 80, 80)[0]
    jobs = driver.run([prompt] * 8, temperature=1.0)
    assert sorted(job.reused for job in jobs) == [0] + [79] * 7
    for job in jobs:
        np.testing.assert_allclose(job.logprobs, driver.logprobs(job), atol=1e-4)


def test_a_branch_does_not_destroy_the_conversation_it_branched_from(driver: Driver) -> None:
    trunk = prompts(1, 60, 60)[0]
    first = driver.run([trunk])[0]
    branch = driver.run([[*trunk[:30], 7, 8, 9]])[0]
    again = driver.run([[*trunk, *first.ids, 11]])[0]
    assert (branch.reused, again.reused) == (30, 60 + 11)
    np.testing.assert_allclose(branch.logprobs, driver.logprobs(branch), atol=1e-4)
    np.testing.assert_allclose(again.logprobs, driver.logprobs(again), atol=1e-4)


def test_more_conversations_than_rows_are_still_exact(tiny_dir: Path) -> None:
    d = Driver(tiny_dir, max_batch=3, cache_mb=1)
    assert d.engine.cache.rows < 10
    histories = prompts(25, 10, 60, seed=5)
    for turn in range(3):
        for i, job in enumerate(d.run(histories, n=5)):
            np.testing.assert_allclose(job.logprobs, d.logprobs(job), atol=1e-4)
            histories[i] = [*histories[i], *job.ids, turn + 5]
    d.engine.close()


def test_a_long_prompt_is_read_in_chunks_beside_running_sequences(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    size = 2 * PREFILL_TOKENS + 300
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=size + 50,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    d = Driver(tmp_path, max_context=size + 50)
    jobs = d.run([*prompts(5, 10, 30), *prompts(1, size, size), *prompts(5, 10, 200, seed=9)], n=20)
    for job in jobs:
        np.testing.assert_allclose(job.logprobs, d.logprobs(job), atol=1e-4)
    d.engine.close()


def test_new_weights_take_effect_in_place_and_forget_the_old_keys(driver: Driver, tmp_path: Path) -> None:
    asked = prompts(4, 30, 50)
    before = driver.run(asked, temperature=0.0)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in driver.reference.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    driver.reference.save_pretrained(tmp_path)
    engine = driver.engine
    with pytest.raises(UserError, match="pause"):
        engine.reload(tmp_path, 5).result(10)
    engine.pause().result(10)
    assert engine.reload(tmp_path, 5).result(10) == 5
    with pytest.raises(UserError, match="reset_prefix_cache"):
        engine.resume().result(10)
    generation = engine.reset_cache().result(10)
    engine.resume().result(10)
    after = driver.run(asked, temperature=0.0)
    assert [j.ids for j in after] == [driver.greedy(p, 12) for p in asked] != [j.ids for j in before]
    assert {(j.version, j.generation, j.reused) for j in after} == {(5, generation, 0)}
    for job in after:
        np.testing.assert_allclose(job.logprobs, driver.logprobs(job), atol=1e-4)


def test_weights_that_do_not_fit_change_nothing(driver: Driver, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    asked = prompts(2, 10, 20)
    before = [j.ids for j in driver.run(asked, temperature=0.0)]
    driver.reference.save_pretrained(tmp_path)
    tensors = {k: v + 1 for k, v in load_file(tmp_path / "model.safetensors").items()}
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    driver.engine.pause().result(10)
    with pytest.raises(DataError, match=r"other shapes for model\.layers\.1"):
        driver.engine.reload(tmp_path, 1).result(10)
    with pytest.raises(DataError, match=r"no model\.safetensors"):
        driver.engine.reload(tmp_path / "absent", 1).result(10)
    driver.engine.resume().result(10)
    jobs = driver.run(asked, temperature=0.0)
    assert [j.ids for j in jobs] == before
    assert {j.version for j in jobs} == {0}


def test_pause_waits_for_what_runs_and_holds_what_comes(driver: Driver) -> None:
    engine = driver.engine
    long = Job(np.array([5, 6, 7], np.int32), 300, Sampling(), frozenset())
    engine.submit(long)
    while engine.load[0] == 0:
        time.sleep(0.001)
    engine.pause().result(30)
    assert driver.results.get(timeout=1) is long
    assert len(long.ids) == 300
    held = Job(np.array([5, 6], np.int32), 3, Sampling(), frozenset())
    engine.submit(held)
    with pytest.raises(queue.Empty):
        driver.results.get(timeout=0.3)
    engine.resume().result(10)
    assert driver.results.get(timeout=10) is held


def test_a_reset_is_served_although_requests_keep_coming(driver: Driver) -> None:
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            driver.engine.submit(Job(np.array([5, 6, 7], np.int32), 40, Sampling(), frozenset()))
            driver.results.get(timeout=30)

    threads = [threading.Thread(target=traffic) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = driver.engine.cache.generation
    assert driver.engine.reset_cache().result(10) == before + 1
    stop.set()
    for thread in threads:
        thread.join()
    assert driver.engine.load == (0, 0)


def test_an_aborted_sequence_ends_and_frees_its_row(driver: Driver) -> None:
    job = Job(np.array([5, 6, 7], np.int32), 500, Sampling(), frozenset())
    waiting = Job(np.array([5, 6, 7], np.int32), 500, Sampling(), frozenset())
    driver.engine.submit(job)
    driver.engine.abort(job)
    driver.engine.submit(waiting)
    driver.engine.abort(waiting)
    assert {driver.results.get(timeout=10).finish for _ in range(2)} == {"abort"}
    assert driver.engine.load == (0, 0)
    assert len(driver.run(prompts(16, 5, 9))) == 16


def test_a_seed_decides_whatever_shares_the_batch(driver: Driver) -> None:
    prompt = prompts(1, 20, 20)[0]
    alone = driver.run([prompt], seed=11)[0].ids
    jobs = [Job(np.array(p, np.int32), 12, Sampling(), frozenset()) for p in prompts(9, 5, 60, seed=4)]
    jobs.insert(4, Job(np.array(prompt, np.int32), 12, Sampling(seed=11), frozenset()))
    for job in jobs:
        driver.engine.submit(job)
    for _ in jobs:
        driver.results.get(timeout=30)
    assert jobs[4].ids == alone
    assert driver.run([prompt], seed=12)[0].ids != alone


def test_a_failing_step_ends_its_sequences_and_the_engine_lives(driver: Driver) -> None:
    bad = Job(np.array([10**6], np.int32), 3, Sampling(), frozenset())
    driver.engine.submit(bad)
    job = driver.results.get(timeout=10)
    assert job is bad
    assert job.finish == "error"
    assert "IndexError" in job.error
    asked = prompts(2, 4, 8)
    assert [j.ids for j in driver.run(asked, temperature=0.0)] == [driver.greedy(p, 12) for p in asked]


def test_models_with_other_attention_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sliding_attention"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}),
        ({"top_k": 2}, {0: 0.625, 1: 0.375}),
        ({"top_p": 0.79}, {0: 0.625, 1: 0.375}),
        ({"top_p": 0.81}, {0: 0.5 / 0.95, 1: 0.3 / 0.95, 2: 0.15 / 0.95}),
        ({"temperature": 0.5}, {0: 0.25 / 0.365, 1: 0.09 / 0.365, 2: 0.0225 / 0.365, 3: 0.0025 / 0.365}),
        ({"top_p": 0.0}, {0: 1.0}),
    ],
)
def test_reported_probability_is_that_of_the_distribution_sampled(
    settings: dict[str, Any], allowed: dict[int, float]
) -> None:
    count = 2000
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(count, 4)
    tokens, logprobs = draw(logits, [Sampling(seed=i, **settings) for i in range(count)])
    seen = Counter(tokens)
    assert set(seen) == set(allowed)
    for token, p in allowed.items():
        assert abs(seen[token] / count - p) < 4 * math.sqrt(p * (1 - p) / count) + 1e-9
    for token, value in zip(tokens, logprobs, strict=True):
        assert value == pytest.approx(math.log(allowed[token]), abs=1e-5)
