"""The one place that imports mini-SWE-agent, unmodified and without litellm.

The library reads a configuration directory, loads a .env file into the process and prints a banner when it is imported.
A rollout must not depend on what lies in somebody's home, so it is pointed at an empty directory of ours and told to be
silent first.
"""

from __future__ import annotations

import os

from swe_lightning import paths

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(paths.home() / "mini-swe-agent"))

from minisweagent import __version__ as VERSION
from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import (
    FormatError,
    InterruptAgentFlow,
    LimitsExceeded,
    Submitted,
    TimeExceeded,
)
from minisweagent.models.utils.actions_text import parse_regex_actions

__all__ = [
    "VERSION",
    "DefaultAgent",
    "FormatError",
    "InterruptAgentFlow",
    "LimitsExceeded",
    "Submitted",
    "TimeExceeded",
    "parse_regex_actions",
]
