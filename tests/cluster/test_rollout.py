"""A rollout through the real stack with pods as boxes: harness outside, verdict in a fresh pod."""

from __future__ import annotations

import time
from typing import Any

from swe_lightning.controller.stack import Stack
from swe_lightning.recipe import KubernetesSection
from swe_lightning.sandbox.kubernetes_api import OURS, Cluster

from ..integration.conftest import repository, task  # noqa: F401 (fixtures)
from ..integration.test_rollout_path import CONFIG, play, stack  # noqa: F401 (a fixture)


def test_the_same_path_with_pods(cluster: str, stack: Stack, task: dict[str, Any]) -> None:  # noqa: F811
    stack.serve_script("enumerate", None)
    sandbox = {**CONFIG["sandbox"], "backend": "kubernetes", "image": cluster, "cpu": 0.5}
    (rollout,) = play(stack, task, "pod", 1, {**CONFIG, "sandbox": sandbox})
    assert rollout.outcome is not None
    assert rollout.outcome.infra_reason is None, rollout.outcome.message
    assert (rollout.outcome.reward, rollout.outcome.exit_status) == (1.0, "submitted")
    absent = {**sandbox, "image": "no/such:1", "kubernetes": {"image_pull_policy": "Never"}}
    (failed,) = play(stack, task, "no-image", 1, {**CONFIG, "sandbox": absent})
    assert failed.outcome is not None
    assert (failed.outcome.reward, failed.outcome.infra_reason) == (None, "image_unavailable")
    api = Cluster(KubernetesSection())
    until = time.monotonic() + 30
    while jobs := api.find("jobs", OURS):
        assert time.monotonic() < until, jobs
        time.sleep(0.2)
    api.close()
