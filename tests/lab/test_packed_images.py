"""Images of any sizes, kept behind one another and laid out in groups of like sizes."""

import os
import subprocess
import sys

import pytest
import torch

from rankgrad.lab.detection import batches
from rankgrad.lab.detection import config as detection
from rankgrad.lab.retrieval.images import augment
from rankgrad.lab.retrieval.images.config import View
from rankgrad.lab.vision.images import PackedImages, Store, like_sizes, whole

CPU = torch.device("cpu")


def ragged(*sizes):
    generator = torch.Generator().manual_seed(0)
    return PackedImages.of(
        [torch.randint(0, 256, (h, w, 3), dtype=torch.uint8, generator=generator) for h, w in sizes]
    )


def padded(batch):
    """Pixels of the largest and of all groups a batch is laid out in."""
    found = [
        len(rows) * int(batch.height[rows].max()) * int(batch.width[rows].max()) for rows in like_sizes(batch)
    ]
    return max(found), sum(found)


def test_a_batch_of_photographs_is_one_group():
    batch = ragged((256, 384), (384, 256), (256, 256), (256, 500), (300, 256))
    assert [rows.tolist() for rows in like_sizes(batch)] == [[0, 1, 2, 3, 4]]


def test_one_wide_image_does_not_make_a_batch_wide(monkeypatch):
    batch = ragged(*[(64, 80)] * 30, (64, 1024), (1024, 64), (64, 1000))
    used = int((batch.height * batch.width).sum())
    assert padded(batch)[1] < 4 * used < 33 * 1024 * 1024
    assert sorted(torch.cat(like_sizes(batch)).tolist()) == list(range(33))
    view = View(resize=64, crop=56, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), scale=0.2, flip=True)
    boxes, flips = augment.training_boxes(batch.height, batch.width, view, torch.Generator().manual_seed(0))
    apart = augment.crops(batch, boxes, flips, view)
    look = detection.View(short=60, long=100)
    apart_canvas = batches.canvas(batch, flips, look)
    for module in (augment, batches):
        monkeypatch.setattr(module, "like_sizes", lambda images: [torch.arange(len(images))])
    torch.testing.assert_close(apart, augment.crops(batch, boxes, flips, view), rtol=1e-4, atol=1e-4)
    together = batches.canvas(batch, flips, look)
    torch.testing.assert_close(apart_canvas.images, together.images, rtol=1e-4, atol=1e-3)
    assert apart_canvas.sizes == together.sizes


def test_groups_are_bounded(monkeypatch):
    monkeypatch.setattr("rankgrad.lab.vision.images._SIDE_BY_SIDE", 50_000)
    batch = ragged(*[(64, 80)] * 33, (200, 300))
    assert max(len(rows) * 64 * 80 for rows in like_sizes(batch)[:-1]) <= 50_000
    assert padded(batch)[0] <= 60_000  # an image alone may be larger
    for rows in like_sizes(batch):
        assert whole(batch.rows(rows)).shape[0] == len(rows)


def test_many_parts_are_joined(monkeypatch):
    monkeypatch.setattr("rankgrad.lab.vision.images._AT_A_TIME", 3)
    sources = [torch.full((2 + n % 3, 4, 3), n, dtype=torch.uint8) for n in range(10)]
    store = Store(sources, [str(n) for n in range(10)], lambda s: s, cache="ram", workers=2, device=CPU)
    assert all(torch.equal(store.image(n), sources[n]) for n in range(10))
    parts = [ragged((2, 3)), ragged((4, 5))]
    PackedImages.joined(parts)
    assert parts == []  # freed on the way


THREADS = """
import os, threading, torch
from rankgrad.lab.vision.images import PackedImages
torch.set_num_threads(4)
images = [torch.randint(255, (200, 300, 3), dtype=torch.uint8) for _ in range(4)]
packed = PackedImages.of(images)
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
def work():
    packed.packed(torch.tensor([2, 0]))
    print(threads() - before)
worker = threading.Thread(target=work)
worker.start()
worker.join()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_packing_wakes_no_threads():
    """Torch would start a team of threads for every worker that packs batches, and keep them spinning."""
    ran = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert ran.stdout == "1\n"  # the worker itself
