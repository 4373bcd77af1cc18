"""The process that mounts trees and starts boxes. Standard library only; started by `local.py` through BOOT."""

BOOT = (
    "import sys, types; package = types.ModuleType('sandbox'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['sandbox'] = package; from sandbox.launcher.main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
"""Its program: this room without its `__init__`, which would bring pydantic along. Arguments: room, socket, plan."""
