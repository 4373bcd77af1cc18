"""What the operator's page promises: every metric and every refusal is on it, and nothing that does not exist."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swe_lightning import gateway as room

from .conftest import EngineServer, GatewayProcess, ask, http, running

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"


def scrape(gateway: GatewayProcess) -> str:
    headers = {"authorization": f"Bearer {gateway.keyring.mint('control')}"}
    return http.get(f"{gateway.url}/metrics", headers=headers).text


def table(heading: str) -> str:
    return PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_metrics_are_those_of_the_page(gateway: GatewayProcess) -> None:
    ask(gateway.lease())
    families = set(re.findall(r"^# TYPE swel_gateway_(\w+) ", scrape(gateway), re.M))
    first_column = " ".join(line.split("|")[1] for line in table("Health, metrics, log").splitlines() if "|" in line)
    documented = set(re.findall(r"`([a-z_]+)(?:\{\w+\})?`", first_column))
    assert families == documented


def test_codes_are_those_of_the_page() -> None:
    source = "\n".join(path.read_text() for path in Path(room.__path__[0]).rglob("*.py"))
    raised = set(re.findall(r'\b([45]\d\d), "([a-z]+_?[a-z_]*)"', source))
    raised |= {("503", "paused"), ("503", "gateway_busy")}
    rows = [line.split("|")[1:3] for line in table("Failures").splitlines() if re.match(r"\| [45]", line)]
    documented = {(status.strip(), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    missing = {pair for pair in raised if pair not in documented and pair[1] not in {c for _, c in documented}}
    assert not missing
    assert {code for _, code in documented} <= set(re.findall(r'"([a-z_]+)"', source))


def test_the_commands_of_the_page_work_as_they_stand(gateway: GatewayProcess) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here; install Debian's package curl")
    commands = re.findall(r"^    (curl .*(?:\n {9,}.*)*)", PAGE.read_text(), re.M)
    assert len(commands) == 3
    script = "\n".join(["set -e", 'curl() { command curl -fsS --noproxy "*" "$@"; echo; }', *commands])
    environment = os.environ | {"GATEWAY": gateway.url, "CONTROL": gateway.keyring.mint("control")}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert gateway.client.get_rollout("try").state == "running"
    assert "agent_token" in done.stdout


def test_a_model_server_with_other_weights_than_registered_is_named_in_the_log(
    gateway: GatewayProcess, engine: EngineServer
) -> None:
    lease = gateway.lease()
    engine.engine.headers = {"x-swel-weight-version": "3"}
    for _ in range(2):
        assert ask(lease).status_code == 200
    assert {call.reason for call in gateway.client.calls(lease.rollout.rollout_id)} == {"mixed_weights"}
    lines = map(json.loads, (gateway.run / "logs" / "gateway.jsonl").read_text().splitlines())
    told = [
        (line["registered"], line["says"]) for line in lines if line.get("upstream") == engine.url and "says" in line
    ]
    assert told == [(1, 3)]


def value(text: str, name: str) -> float:
    found = re.search(rf"^swel_gateway_{re.escape(name)} (\S+)$", text, re.M)
    assert found, f"{name} is not there"
    return float(found[1])


def test_metrics_count_what_happened(tmp_path: Path) -> None:
    engine = EngineServer()
    with running(tmp_path) as gateway:
        lease = gateway.lease(register=engine.url)
        for _ in range(3):
            assert ask(lease).status_code == 200
        engine.engine.behaviour = lambda _p, _b: (500, b"boom", {})
        assert ask(lease).status_code == 502
        text = scrape(gateway)
        for name, expected in (
            ('calls_total{result="ok"}', 3),
            ('calls_total{result="upstream_error"}', 1),
            ('untrainable_calls_total{reason="upstream_error"}', 1),
            ("call_seconds_count", 3),
            ('call_seconds_bucket{le="+Inf"}', 3),
            ("upstream_seconds_count", 4),
            ("in_flight", 0),
            (f'upstream_up{{url="{engine.url}"}}', 1),
            (f'weight_version{{url="{engine.url}"}}', 1),
            ('rollouts{state="running"}', 1),
        ):
            assert value(text, name) == expected, name
        assert value(text, "commit_seconds_count") >= 6
        assert value(text, "commit_seconds_sum") > 0
    engine.stop()


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(tmp_path: Path) -> None:
    """Started under the usual soft limit of 1,024, with a hard one below what is wanted."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 3000));"
        "from swe_lightning.gateway.server import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, "--run", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if " serving " in line:
                break
            assert "open files are limited" in line
            assert "limit=3000" in line
        assert psutil.Process(process.pid).rlimit(resource.RLIMIT_NOFILE) == (3000, 3000)
    finally:
        process.terminate()
        process.communicate(timeout=20)
