"""What the library and the command hold: the longest list, the largest batch, images of the largest size.

Every row is a process of its own, so that its peak of memory is its own::

    python -m benchmarks.load lists 27        # a list of 2^27 items, forward and backward
    python -m benchmarks.load batch 15        # a batch of 2^15 embeddings of length 128, every one a query
    python -m benchmarks.load images 8        # 8 images of 13,300 x 13,300 and a strip, read by 8 workers
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from struct import pack

import torch


def peak() -> float:
    """The most memory this process has held so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measured(name: str, work: Callable[[], str]) -> None:
    """Print what was done, its seconds and its peak of memory above what was there before."""
    before, begin = peak(), time.perf_counter()
    told = work()
    seconds = time.perf_counter() - begin
    print(f"{name}: {seconds:.1f} s, peak {peak():.2f} GB ({peak() - before:.2f} GB above the start); {told}")


def lists(power: int) -> str:
    """Average precision of one list of 2^power items, one in a thousand relevant, with its gradient."""
    import rankgrad

    n = 2**power
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(n, generator=generator).requires_grad_()
    relevance = torch.rand(n, generator=generator) < 1e-3
    loss = rankgrad.average_precision_loss(scores, relevance)
    loss.backward()
    assert scores.grad is not None and bool(scores.grad.isfinite().all())
    return f"{n:,} items, loss {loss.item():.4f}, {int((scores.grad != 0).sum()):,} of them with a gradient"


def batch(power: int) -> str:
    """RecallLoss of 2^power embeddings of length 128, four of a class, with its gradient."""
    import rankgrad

    n = 2**power
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(n, 128, generator=generator).requires_grad_()
    loss = rankgrad.RecallLoss()(embeddings, torch.arange(n) // 4)
    loss.backward()
    assert embeddings.grad is not None and bool(embeddings.grad.isfinite().all())
    return f"{n:,} queries with {n - 1:,} candidates each, loss {loss.item():.4f}"


def _png(path: Path, width: int, height: int) -> None:
    """A black RGBA image, drawn row by row."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return pack(">I", len(content)) + name + content + pack(">I", zlib.crc32(name + content))

    packer, row = zlib.compressobj(1), b"\0" * (1 + 4 * width)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b""))


def images(many: int) -> str:
    """``many`` images of 13,300 x 13,300 with transparency, the largest Pillow opens, and a strip; 8 workers."""
    from rankgrad.lab.retrieval.images.config import View
    from rankgrad.lab.retrieval.images.source import decode
    from rankgrad.lab.vision.images import Store

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.png" for n in range(many + 1)]
        _png(paths[0], 13_300, 13_300)
        for path in paths[1:many]:
            path.hardlink_to(paths[0])
        _png(paths[many], 1, 4_000)
        view, begin = View(resize=256, crop=224), peak()
        names = [path.name for path in paths]
        store = Store(
            paths, names, lambda path: decode(path, view), cache="ram", workers=8, device=torch.device("cpu")
        )
        return f"{len(store.kept)} read, {store.faults[0]}; {peak() - begin:.2f} GB above what drawing them took"


if __name__ == "__main__":
    kind, size = sys.argv[1], int(sys.argv[2])
    measured(f"{kind} {size}", lambda: {"lists": lists, "batch": batch, "images": images}[kind](size))
