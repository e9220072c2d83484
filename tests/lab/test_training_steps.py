"""The steps of a run: learning rates, parameter groups, precision, torch.compile, random numbers."""

import random
import warnings

import numpy as np
import pytest
import torch

from rankgrad import distributed
from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.training import optim
from rankgrad.lab.training.config import Optim
from rankgrad.lab.training.loop import Trainer
from rankgrad.lab.training.seeding import seed_step

from runs import rows, same_weights

SHORT = ["epochs=2", "save_minutes=0", "evaluate_first=false", "device=cpu"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "steps", "milestones": [1], "decay": 0.3}, [1, 1, 0.3, 0.3]),
        ({"schedule": "steps", "milestones": [0.5, 1.5], "decay": 0.5}, [1, 0.5, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2]),
        ({"schedule": "constant", "warmup": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "constant", "warmup": 500}, [0.5, 1, 1, 1]),  # half of a short run
    ],
)
def test_learning_rates(settings, expected):
    config = Optim(lr=2.0, **settings)
    found = [optim.learning_rate(config, step, 2, 2) for step in range(4)]
    assert found == pytest.approx([2 * e for e in expected])


def test_a_schedule_that_does_not_fit_the_run_is_told():
    """A detector on few images would end within its warm-up; one with more epochs would learn at a low rate."""
    config = recipes.load("coco", [])[1].optim
    assert optim.schedule_warnings(config, 90, 12) == [] == optim.schedule_warnings(config, 5000, 12)
    assert optim.schedule_warnings(config, 10, 12) == [
        "epochs=12 is 120 steps in all, which may be too few: optim.warmup=500 is cut to 60 steps; try epochs=100 "
        "optim.milestones=[75]"
    ]
    for epochs, better in ((100, 75), (8, 6)):  # early in the run, and behind its end
        assert optim.schedule_warnings(config, 200, epochs) == [
            f"optim.milestones end at epoch 9 of {epochs}, so the rate falls too early or never: try "
            f"optim.milestones=[{better}]"
        ]
    assert optim.schedule_warnings(recipes.load("coco", ["epochs=100", "milestones=[75]"])[1].optim, 10, 100) == []
    assert optim.schedule_warnings(Optim(lr=1.0, schedule="cosine"), 1, 1) == []


def test_parameter_groups(tmp_path):
    """Backbone, embedding and proxies at their own rates; nothing left out, nothing twice."""
    settings = ["loss=pml:ProxyNCALoss", "embedding_lr=7", "proxy_lr=0.05", "lr=1e-3"]
    kind, config = recipes.load("digits", settings)
    task = kind(config, torch.device("cpu"))
    trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
    optim.set_rates(trainer.optimizer, config.optim, 0, 8, 10)
    groups = trainer.optimizer.param_groups
    assert [g["lr"] for g in groups] == pytest.approx([1e-3, 7e-3, 5e-2])
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for m in (task.network, task.loss) for p in m.parameters())
    assert [tuple(p.shape) for p in groups[2]["params"]] == [(10, 16)]


def test_fp16_scales_the_loss_and_leaves_lambda_alone(tmp_path):
    """A GradScaler multiplies the loss by 65,536; the update must be that of the plain gradient."""
    kind, config = recipes.load("digits", ["optim=sgd", "lr=0.1", "loss=recall", "loss.lam=4"])
    task = kind(config, torch.device("cpu"))
    start = {n: t.clone() for n, t in task.network.state_dict().items()}
    found = []
    for scale in (1.0, 65536.0):
        task.network.load_state_dict(start)
        trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer._train_step(task.network)
        found.append([p.clone() for p in task.network.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert any(
        not torch.equal(a, start[n]) for (n, _), a in zip(task.network.named_parameters(), found[0], strict=True)
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_too(tmp_path, precision):
    _, (result,) = run.run("digits", ["epochs=2", f"precision={precision}", "device=cpu"], out=str(tmp_path / "a"))
    assert result.last["mAP@R"] > 70 and result.last["R@1"] > 94


def test_automatic_precision_is_half_on_a_gpu_only():
    """bf16 takes five to eight times as long as fp32 on a CPU without instructions for it."""
    ones = torch.ones(2, 2)
    for precision, dtype in (("auto", torch.float32), ("bf16", torch.bfloat16)):
        with optim.autocast(precision, torch.device("cpu")):
            assert (ones @ ones).dtype == dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: there is no GPU here
        assert optim.autocast("auto", torch.device("cuda")).fast_dtype == torch.bfloat16
    for name in recipes.recipe_names():
        assert recipes.load(name)[1].precision in ("auto", "fp32"), name


def test_compiled_training_is_the_same(tmp_path, monkeypatch):
    """Through the tracer, without waiting for a compiler; the weights keep their names."""
    folders = [run.run("digits", SHORT, out=str(tmp_path / "plain"))[0]]
    monkeypatch.setattr(Trainer, "_wrapped", lambda self: torch.compile(self.task.network, backend="eager"))
    folders.append(run.run("digits", SHORT, out=str(tmp_path / "compiled"))[0])
    assert rows(folders[0]) == rows(folders[1])
    assert same_weights(*(folder / "last.safetensors" for folder in folders))


@pytest.mark.parametrize("several", [False, True])
def test_what_is_compiled_is_recorded_in_one_process(tmp_path, monkeypatch, several):
    kind, config = recipes.load("digits", [*SHORT, "compile=true"])
    task = kind(config, torch.device("cpu"))
    trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
    assert task.same_shapes and torch.backends.cudnn.benchmark
    task.same_shapes = False  # as a detector's
    Trainer(task, config, tmp_path, torch.device("cpu"))
    assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch, "compile", lambda network, mode, dynamic: (network, mode, dynamic))
    assert trainer._wrapped() is task.network  # on a CPU nothing is compiled
    trainer.device = torch.device("cuda")
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda network, device_ids: network)
    monkeypatch.setattr(distributed, "active", lambda: several)
    mode = None if several else "reduce-overhead"
    assert trainer._wrapped() == (task.network, mode, None)
    task.same_shapes = True
    assert trainer._wrapped() == (task.network, mode, False)
    trainer.config = recipes.load("digits", SHORT)[1]
    assert trainer._wrapped() is task.network  # nor what is not asked for


def test_every_step_seeds_every_generator():
    def draws(seed, step):
        seed_step(seed, step)
        return torch.rand(1).item(), np.random.rand(), random.random()

    assert draws(0, 3) == draws(0, 3)
    for other in (draws(0, 4), draws(1, 3)):
        assert all(a != b for a, b in zip(draws(0, 3), other, strict=True))


def test_every_step_draws_its_own_crops(monkeypatch):
    """Fixed by (seed, step): the same image is cut differently in every step, and alike in a repeated run."""
    from rankgrad.lab.retrieval.images import augment

    seen, inner = [], augment.crops

    def watched(images, boxes, flips, view):
        seen.append((boxes, flips))
        return inner(images, boxes, flips, view)

    monkeypatch.setattr(augment, "crops", watched)
    settings = ["view.resize=12", "view.augment=resized_crop", "view.flip=true"]
    for seed in (0, 0, 1):
        kind, config = recipes.load("digits", [*settings, f"seed={seed}"])
        task = kind(config, torch.device("cpu"))
        for step in (0, 1):
            task.batch_loss(task.network, step)
    first, second, *again, other, _ = seen
    for a, b in zip((first, second), again, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    for b in (second, other):
        assert not torch.equal(first[0], b[0]) and not torch.equal(first[1], b[1])
