"""Training on a GPU: the same crops, no waiting inside a step, and digits learn in low precision."""

import pytest
import torch

from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images import augment
from rankgrad.lab.retrieval.images.config import View
from rankgrad.lab.training.log import read_table
from rankgrad.lab.training.loop import Trainer
from rankgrad.lab.vision.images import MEAN, STD, PackedImages

pytestmark = pytest.mark.gpu


def test_crops_equal_those_of_the_cpu():
    images = [torch.randint(256, shape, dtype=torch.uint8) for shape in ((40, 64, 3), (70, 40, 3), (40, 40, 3))]
    batch = PackedImages.of(images)
    view = View(resize=40, crop=32, mean=MEAN, std=STD, scale=0.2, flip=True)
    boxes, flips = augment.training_boxes(batch.height, batch.width, view, torch.Generator().manual_seed(0))
    expected = augment.crops(batch, boxes, flips, view)
    found = augment.crops(batch.to(torch.device("cuda")), boxes, flips, view)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("cache", ["ram", "device", "none"])
def test_digits_learn(tmp_path, precision, cache):
    settings = ["epochs=3", f"precision={precision}", f"data.cache={cache}", "device=cuda"]
    folder, (result,) = run.run("digits", settings, out=str(tmp_path / "a"))
    assert result.last["mAP@R"] > 75  # 79 on an H200, 83 in float32 on a CPU
    again, (same,) = run.run("digits", settings, out=str(folder), resume=True)
    assert again == folder
    assert same.best == result.best


def test_a_step_does_not_wait_for_the_device(tmp_path):
    device = torch.device("cuda")
    kind, config = recipes.load("digits", ["data.cache=device", "precision=bf16", "view.augment=resized_crop"])
    task = kind(config, device)
    trainer = Trainer(task, config, tmp_path, device)
    for _ in range(4):  # first use of everything, and the memory filled
        trainer._train_step(task.network)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._train_step(task.network)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_network_learns_the_same(tmp_path):
    """Recorded launches write to the same places in every step: nothing may be lost to the next one."""
    settings = ["epochs=3", "device=cuda", "evaluate_every=3"]
    runs = [run.run("digits", [*settings, f"compile={c}"], out=str(tmp_path / c)) for c in ("true", "false")]
    losses = [torch.tensor([float(row["loss"]) for row in read_table(folder / "steps.csv")]) for folder, _ in runs]
    # Ranks make runs part: weights that differ by 1e-6 have losses 2 % apart after 5 steps, 6 % after 12. An
    # update that is lost, or a step late, shows as 25 % in the second. (Measured on a CPU.)
    torch.testing.assert_close(losses[0][:5], losses[1][:5], rtol=3e-2, atol=1e-3)
    assert min(result.last["mAP@R"] for _, (result,) in runs) > 75
