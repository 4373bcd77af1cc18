"""The CPU as a verl platform, so that verl trains where there is no accelerator.

verl loads this module by the `verl.plugins` entry point (declared in pyproject.toml) whenever it is imported; importing
it registers the platform, and nobody has to set an environment variable. verl asks the platforms in the order of their
registration, so a CUDA, ROCm or Ascend device always wins over this one.
Refuses nothing and patches nothing: it only fills in the abstract methods of verl's PlatformBase.
"""

from __future__ import annotations

import resource
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _resident_bytes(*_: Any, **__: Any) -> int:
    """Peak resident memory of this process: what "allocated device memory" means on a CPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _device_module() -> types.ModuleType:
    """`torch.cpu` with the members verl reads from `torch.cuda`."""
    module = types.ModuleType("swe_lightning_cpu_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _resident_bytes)
    for name in (
        "empty_cache",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "set_device",
        "set_per_process_memory_fraction",
        "synchronize",
    ):
        setattr(module, name, _nothing)

    def mem_get_info(*_: Any, **__: Any) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "mem_get_info": mem_get_info,
    }
    for name, value in members.items():
        setattr(module, name, value)
    return module


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One device, the processor; collectives over gloo; Ray hands out workers by its logical GPU count."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "SWEL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
