"""The machine: which device a setting means, and what a result was measured on."""

from __future__ import annotations

import platform
import time
from importlib import metadata
from pathlib import Path

import torch

from rankgrad import distributed
from rankgrad.lab.training.errors import UserError

_PACKAGES = ("rankgrad", "torch", "triton", "numba", "torchvision", "timm", "pytorch-metric-learning")


def device_of(name: str) -> torch.device:
    """The device a setting means."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device: unknown value {name!r}, say auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device: expected a GPU for {name!r}, torch finds none")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: expected a GPU for {name!r}, torch finds {torch.cuda.device_count()}")
    return device


def available_bytes(device: torch.device) -> int:
    """Memory that can still be used: the GPU's, or the machine's and its container's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    if not (info := Path("/proc/meminfo")).is_file():
        return 2**40  # not Linux: unknown
    lines = info.read_text().splitlines()
    found = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        found.append(int(text) - int(used.read_text()) + int(stat.get("file", 0)))  # cached files can go
    return min(found)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, str]:
    """Hardware, versions and date."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    hardware = f"{_processor()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}; {hardware}"
    return {
        "hardware": hardware,
        "processes": str(distributed.count()),
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def summary(device: torch.device) -> str:
    """Hardware and versions, for the head of a table."""
    described = describe(device)
    return f"{described['hardware']}; {described['versions']}"


def duration(seconds: float) -> str:
    """``1 h 02 min``, ``3 min 20 s``, ``4.2 s``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.1f} s"
