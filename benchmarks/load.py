"""What the library and the command hold: the longest list, the largest batch, images of the largest size.

Every row is a process of its own, so that its peak of memory is its own::

    python -m benchmarks.load lists 27        # a list of 2^27 items, forward and backward
    python -m benchmarks.load batch 15        # a batch of 2^15 embeddings of length 128, every one a query
    python -m benchmarks.load images 8 png    # 8 images of 13,300 x 13,300 and a strip, read by 8 workers
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


#: Kinds of files, all of 13,300 x 13,300 pixels: Pillow's mode and format, and how it is saved.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "png": ("RGBA", "PNG", {"compress_level": 1}),
    "palette": ("P", "PNG", {"compress_level": 1}),
    "jpeg": ("CMYK", "JPEG", {}),
    "progressive": ("CMYK", "JPEG", {"progressive": True}),
    "webp": ("RGBA", "WEBP", {"lossless": True, "method": 0, "quality": 0}),
    "tiff": ("RGBA", "TIFF", {"compression": "tiff_lzw"}),
    "gif": ("P", "GIF", {}),
    "bmp": ("RGB", "BMP", {}),
    "avif": ("RGB", "AVIF", {"speed": 10}),
}


def draw(path: str, kind: str) -> None:
    """A black image, the largest that Pillow opens."""
    from PIL import Image

    mode, form, options = KINDS[kind]
    Image.new(mode, (13_300, 13_300)).save(path, form, **options)


def images(many: int, kind: str) -> str:
    """``many`` images of the largest size, and a strip of 1 x 4,000; read by 8 workers."""
    from PIL import Image

    from rankgrad.lab.retrieval.images.config import View
    from rankgrad.lab.retrieval.images.source import decode
    from rankgrad.lab.vision.images import Store

    with tempfile.TemporaryDirectory() as folder:
        path, strip = Path(folder) / f"large.{kind}", Path(folder) / "strip.png"
        drawing = multiprocessing.get_context("spawn").Process(target=draw, args=(str(path), kind))
        drawing.start()  # in a process of its own: what it needs does not count
        drawing.join()
        Image.new("L", (1, 4_000)).save(strip)
        view, begin = View(resize=256, crop=224), peak()
        paths = [path] * many + [strip]
        names = [path.name for path in paths]
        store = Store(
            paths, names, lambda path: decode(path, view), cache="ram", workers=8, device=torch.device("cpu")
        )
        told = f"{kind}: {len(store.kept)} read, {store.faults[-1]}"
        return f"{told}; {peak() - begin:.2f} GB above what there was before"


if __name__ == "__main__":
    work: dict[str, Callable[..., str]] = {"lists": lists, "batch": batch, "images": images}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=work)
    parser.add_argument("size", type=int, help="lists and batch: a power of two; images: how many")
    parser.add_argument("kind", nargs="?", default="png", choices=KINDS, help="images: their format")
    args = parser.parse_args()
    more = (args.kind,) if args.what == "images" else ()
    measured(" ".join(sys.argv[1:]), lambda: work[args.what](args.size, *more))
