"""Settings every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Continuous integration runs on two busy cores: slow input generation says nothing about the code under test.
settings.register_profile("swel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("swel")


@pytest.fixture(scope="session")
def swel_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Exported trees, test environments and records of boxes lie in a directory of this session."""
    before = os.environ.get("SWEL_HOME")
    home = tmp_path_factory.mktemp("home")
    os.environ["SWEL_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["SWEL_HOME"]
    else:
        os.environ["SWEL_HOME"] = before


@pytest.fixture(scope="session")
def able(swel_home: Path) -> None:
    """Skips where this machine can start no local box, with the reason and the cure."""
    from swe_lightning.sandbox.check import check_host

    missing = check_host()
    if missing:
        pytest.skip(str(missing))
