"""Checkpoints that trainers write and load: what a loss holds, and where a sampler stands."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankgrad
from rankgrad.samplers import ClassSampler

LABELS = torch.arange(6).repeat_interleave(10)


@pytest.mark.parametrize("make", [rankgrad.RecallLoss, lambda: rankgrad.ProxyRankingLoss(6, 8)])
@pytest.mark.parametrize("inside", [False, True], ids=["prepared", "inside of the model"])
def test_accelerate_loads_a_memory_that_was_saved_empty(tmp_path, make, inside):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[dev]'")
    accelerator = accelerate.Accelerator(cpu=True)
    network, loss = nn.Linear(4, 8), make()
    if inside:
        network.loss = loss
        network = accelerator.prepare(network)
    else:
        network, loss = accelerator.prepare(network, loss)
    accelerator.save_state(tmp_path)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    for value in loss.parameters():
        nn.init.zeros_(value)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(dict(loss.state_dict()), before)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [5, 7], ids=["at the end of an epoch", "in an epoch"])
def test_lightning_resumes_where_the_sampler_is_told(tmp_path, workers, every):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = nn.Linear(1, 1), []

        def train_dataloader(self):
            sampler = ClassSampler(LABELS, size=12, per_class=4)
            sampler.load_state_dict({"step": self.trainer.fit_loop.epoch_loop.total_batch_idx + 1})
            rows = TensorDataset(torch.arange(len(LABELS)))
            return DataLoader(rows, batch_sampler=sampler, num_workers=workers)

        def training_step(self, batch, _):
            self.seen.append(batch[0].tolist())
            return self.weight(torch.ones(1)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(model, checkpoint=None):
        saved = lightning.callbacks.ModelCheckpoint(
            tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1
        )
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            callbacks=[saved],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, ckpt_path=checkpoint)
        return model.seen

    whole = fit(Model())
    assert whole == [batch for epoch in range(3) for batch in epoch_from(5 * epoch)]
    assert fit(Model(), tmp_path / f"step={every}.ckpt") == whole[every:]


def epoch_from(step):
    """The batches of the epoch that begins at this step."""
    sampler = ClassSampler(LABELS, size=12, per_class=4)
    sampler.load_state_dict({"step": step})
    return list(sampler)
