"""Our Modules as the loss of Hugging Face's Trainer, which scales a loss in place."""

import pytest
import torch
from torch import nn

import rankgrad

transformers = pytest.importorskip("transformers")

ROWS, LABELS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) // 8


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Linear(8, 4)

    def forward(self, rows, labels=None, **_):
        return {"embeddings": self.network(rows)}


@pytest.mark.parametrize(
    "loss",
    [rankgrad.AveragePrecisionLoss(), rankgrad.PairRankingLoss(), rankgrad.ProxyRankingLoss(8, 4)],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_under_accumulation(loss, tmp_path):
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=16,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = Embeddings()
    before = model.network.weight.detach().clone()
    transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"rows": row, "labels": label} for row, label in zip(ROWS, LABELS, strict=True)],
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: loss(outputs["embeddings"], labels),
    ).train()
    assert not torch.equal(model.network.weight, before)
