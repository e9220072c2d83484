"""Time, memory and launches of one call, on the CPU or a GPU, and how they grow."""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

Run = Callable[[], object]


def seconds(run: Run, device: torch.device, *, budget: float = 0.4, once_over: float = math.inf) -> float:
    """Median time of a call, after a warm-up, over as many calls as fit ``budget`` seconds (3 to 50).

    A warm-up that takes more than ``once_over`` seconds is the answer.
    """
    first = _on_gpu(run) if device.type == "cuda" else _on_cpu(run)
    if first > once_over:
        return first
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or (len(times) < 50 and time.perf_counter() < end):
        times.append(_on_gpu(run) if device.type == "cuda" else _on_cpu(run))
    return statistics.median(times)


def _on_cpu(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_gpu(run: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def side_by_side(runs: Mapping[str, Run], device: torch.device, *, budget: float = 0.4) -> dict[str, float]:
    """Median times of calls that take turns, so that what else the machine does concerns all of them alike."""
    time_of = _on_gpu if device.type == "cuda" else _on_cpu
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + budget * len(runs)
    for turn in range(50):
        if turn >= 3 and time.perf_counter() > end:
            break
        for name, run in runs.items():
            times[name].append(time_of(run))
    return {name: statistics.median(found) for name, found in times.items()}


def recorded(run: Run) -> Run:
    """A call recorded as a CUDA graph: its replay takes what the device needs, without Python's share."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def graph_seconds(run: Run, device: torch.device) -> float:
    """Median time of the replay of a CUDA graph."""
    return seconds(recorded(run), device, budget=0.2)


def peak_bytes(run: Run, device: torch.device) -> int:
    """Most memory in use during a call, over what was in use before it."""
    run()
    with memory_over_now(device) as peak:
        run()
        return peak()


@contextlib.contextmanager
def memory_over_now(device: torch.device) -> Iterator[Callable[[], int]]:
    """A function that returns the most memory used since, over what is in use now. On a CPU: Linux only."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()

        def peak() -> int:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - allocated
    else:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide as much of the peak
        Path("/proc/self/clear_refs").write_text("5")  # start the peak of resident memory anew
        resident = _status("VmRSS")

        def peak() -> int:
            return _status("VmHWM") - resident

    yield peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def launches(run: Run) -> int:
    """Kernels (and fills and copies) a call launches on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(1 for event in profiler.events() if str(event.device_type).endswith("CUDA"))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, reads and writes together."""
    source = torch.rand(1 << (27 if device.type == "cuda" else 25), device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source), device, budget=0.5)


def growth_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Exponent of x in y by least squares of the logarithms."""
    if len(points) < 2:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return float(sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs))
