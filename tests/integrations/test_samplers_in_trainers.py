"""Samplers in a plain loop, under accelerate and under Lightning: every batch is divided once, by one of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankgrad.samplers import ClassSampler

import processes

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[dev]'")
lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install '.[dev]'")

pytestmark = pytest.mark.slow
LABELS = torch.arange(12).repeat_interleave(9)  # 108 rows: four batches of 24 and some left over
EPOCHS, SIZE = 2, 24


def loader(**kwargs):
    rows = TensorDataset(torch.arange(len(LABELS)))
    return DataLoader(rows, batch_sampler=ClassSampler(LABELS, size=SIZE, per_class=4, **kwargs))


def epochs(batches, set_epoch=None):
    seen = []
    for epoch in range(EPOCHS):
        if set_epoch:
            set_epoch(epoch)
        seen.append([rows.tolist() for (rows,) in batches])
    return seen


class Watcher(lightning.LightningModule):
    """Writes down the rows it is trained on."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Linear(1, 1), [[] for _ in range(EPOCHS)]

    def train_dataloader(self):
        return loader()

    def training_step(self, batch, _):
        self.seen[self.current_epoch].append(batch[0].tolist())
        return self.weight(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, **kwargs):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    quiet |= {"enable_model_summary": False, "default_root_dir": folder, "max_epochs": EPOCHS}
    return lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **kwargs)


def everything(rank, folder):
    dist.init_process_group("gloo")
    found = {"plain": epochs(loader())}
    for name, kwargs in (("lightning", {}), ("lightning, own", {"use_distributed_sampler": False})):
        watcher = Watcher()
        fit(folder, **kwargs).fit(watcher)
        found[name] = watcher.seen
    try:
        fit(folder).fit(Watcher(), loader())
    except TypeError as error:
        found["outside"] = str(error)
    for name, split in (("accelerate", False), ("accelerate, split", True)):
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(split_batches=split)
        )
        prepared = accelerator.prepare(loader())
        found[name] = epochs(prepared)
        late = accelerator.prepare(loader())
        late.set_epoch(1)
        found[name + ", late"] = next(iter(late))[0].tolist()
        found[name + ", forced"] = epochs(loader(shard=True))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found["plain again"] = epochs(loader())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.two(everything, tmp_path_factory.mktemp("samplers"))


@pytest.fixture(scope="module")
def whole():
    return epochs(loader())


@pytest.mark.parametrize(
    "how",
    ["plain", "lightning", "lightning, own", "accelerate, split", "accelerate, forced", "plain again"],
)
def test_each_process_gets_its_half_of_every_batch(found, whole, how):
    for epoch in range(EPOCHS):
        together = [a + b for a, b in zip(*(one[how][epoch] for one in found), strict=True)]
        assert together == whole[epoch]
    assert whole[0] != whole[1]


def test_accelerate_gives_whole_batches_to_processes_in_turn(found, whole):
    """Its way without ``split_batches``: a step is one batch for each process."""
    for epoch in range(EPOCHS):
        first, second = (one["accelerate"][epoch] for one in found)
        assert [b for pair in zip(first, second, strict=True) for b in pair] == whole[epoch]


def test_a_later_epoch_is_reached_by_set_epoch(found, whole):
    assert [one["accelerate, late"] for one in found] == whole[1][:2]
    halves = [one["accelerate, split, late"] for one in found]
    assert halves[0] + halves[1] == whole[1][0]


def test_lightning_says_what_to_do_with_a_loader_made_outside_of_its_hook(found):
    assert all("use_distributed_sampler=False" in one["outside"] for one in found)
