"""Two processes of accelerate, Lightning, Hugging Face's trainers and FSDP2 train as one with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankgrad
from rankgrad.samplers import ClassSampler

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[dev]'")
lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install '.[dev]'")
st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
import datasets
import transformers
from torch.distributed.fsdp import fully_shard

from rankgrad.integrations.sentence_transformers import (
    CachedRankingLoss,
    ClassBatches,
    LossCheckpoint,
    RankingLoss,
)

import processes
import texts

pytestmark = pytest.mark.slow
LABELS = torch.arange(12).repeat_interleave(9)
ROWS = torch.randn(len(LABELS), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(ROWS, LABELS)
EPOCHS, ACCUMULATED, RATE = 2, 2, 0.5


def sampler():
    return ClassSampler(LABELS, size=24, per_class=4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def ranking(**kwargs):
    return rankgrad.RecallLoss(lam=2.0, memory=2, **kwargs)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def alone():
    """What all of them must end with: one process, whole batches, the loss of two batches averaged for a step."""
    model, loss, batches = network(), ranking(), sampler()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for step, rows in enumerate(batches):
            (loss(model(ROWS[rows]), LABELS[rows]) / ACCUMULATED).backward()
            if step % ACCUMULATED == ACCUMULATED - 1:
                optimiser.step()
                optimiser.zero_grad()
    return weights(model), loss.memory.candidates()


def by_accelerate():
    settings = accelerate.DataLoaderConfiguration(split_batches=True)
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=settings, gradient_accumulation_steps=ACCUMULATED
    )
    model, loss = network(), ranking(distributed=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(DATA, batch_sampler=sampler())
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    for _ in range(EPOCHS):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(rows), labels))
                optimiser.step()
                optimiser.zero_grad()
    found = weights(model), loss.memory.candidates()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return found


class Ranked(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.loss = network(), ranking(distributed=True)

    def train_dataloader(self):
        return DataLoader(DATA, batch_sampler=sampler())

    def training_step(self, batch, _):
        return self.loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


def by_lightning(folder):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "default_root_dir": folder, "max_epochs": EPOCHS, "precision": 64}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=ACCUMULATED, **quiet
    )
    ranked = Ranked()
    trainer.fit(ranked)
    return weights(ranked.model), ranked.loss.memory.candidates()


class WithLoss(nn.Module):
    """A model of Hugging Face's kind: returns its loss."""

    def __init__(self):
        super().__init__()
        self.network, self.loss = network(), ranking(distributed=True)

    def forward(self, rows, labels):
        return {"loss": self.loss(self.network(rows), labels)}


class Dictionaries(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, row):
        return {"rows": ROWS[row], "labels": LABELS[row]}


class Trainer(transformers.Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=sampler()))


def by_transformers(folder):
    args = transformers.TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=ACCUMULATED,
        accelerator_config={"split_batches": True},
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        ddp_broadcast_buffers=False,
    )
    model = WithLoss()
    Trainer(model, args, train_dataset=Dictionaries()).train()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return weights(model.network), model.loss.memory.candidates()


def by_fsdp2(rank):
    model, loss, batches = network(), ranking(distributed=True), sampler()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for step, rows in enumerate(batches):
            model.set_requires_gradient_sync(step % ACCUMULATED == ACCUMULATED - 1)
            (loss(model(ROWS[rows]), LABELS[rows]) / ACCUMULATED).backward()
            if step % ACCUMULATED == ACCUMULATED - 1:
                optimiser.step()
                optimiser.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()], loss.memory.candidates()


def by_group(rank):
    """Beside tensor parallelism: the data-parallel group of each process is the process alone."""
    groups = [dist.new_group([one]) for one in range(2)]
    loss = ranking(distributed=True, process_group=groups[rank])
    rows = ClassSampler(LABELS, size=24, per_class=4, shard=False).at(rank)
    model = network()
    loss(model(ROWS[rows]), LABELS[rows]).backward()
    return [p.grad for p in model.parameters()]


def by_sentence_transformers(folder, kind):
    """P x K texts a process in its trainer, with memory; positives of both processes as candidates of both."""
    model = texts.bi_encoder(folder / "bert", dropout=0.0)
    words = texts.sentences(48)
    pairs = kind == "pairs"
    columns = (
        {"query": words, "positive": texts.sentences(48, 1)}
        if pairs
        else {"text": words, "label": [i % 6 for i in range(48)]}
    )
    inner = rankgrad.RecallLoss(lam=1.0, memory=0 if pairs else 2, distributed=True)
    loss = CachedRankingLoss(model, inner, mini_batch_size=4) if pairs else RankingLoss(model, inner)
    args = st.SentenceTransformerTrainingArguments(
        str(folder / kind),
        max_steps=3,
        per_device_train_batch_size=12,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        save_steps=3,
        disable_tqdm=True,
        **({} if pairs else {"batch_sampler": ClassBatches(per_class=3)}),
    )
    before = weights(model)
    trainer = st.SentenceTransformerTrainer(
        model, args, train_dataset=datasets.Dataset.from_dict(columns), loss=loss, callbacks=[LossCheckpoint(loss)]
    )
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return weights(model), inner.memory.candidates(), moved


def everything(rank, folder):
    from pathlib import Path

    dist.init_process_group("gloo")
    if rank == 0:
        texts.bi_encoder(Path(folder) / "bert", dropout=0.0)
    dist.barrier()
    return {
        "fsdp2": by_fsdp2(rank),
        "group": by_group(rank),
        "lightning": by_lightning(folder),
        "accelerate": by_accelerate(),
        "transformers": by_transformers(f"{folder}/hf"),
        "labels": by_sentence_transformers(Path(folder), "labels"),
        "pairs": by_sentence_transformers(Path(folder), "pairs"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.two(everything, tmp_path_factory.mktemp("trainers"))


@pytest.fixture(scope="module")
def one():
    return alone()


@pytest.mark.parametrize("how", ["fsdp2", "lightning", "accelerate", "transformers"])
def test_two_processes_are_one(found, one, how):
    for process in found:
        torch.testing.assert_close(process[how][0], one[0])
        torch.testing.assert_close(process[how][1], one[1])
    assert any(not torch.equal(a, b) for a, b in zip(one[0], network().parameters(), strict=True))


def test_a_group_of_processes(found):
    for rank, process in enumerate(found):
        model, rows = network(), sampler().at(rank)
        ranking()(model(ROWS[rows]), LABELS[rows]).backward()
        torch.testing.assert_close(process["group"], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("how", ["labels", "pairs"])
def test_sentence_transformers(found, how):
    """Both processes end with the same weights and the same memory, which has the texts of both."""
    first, second = (process[how] for process in found)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    torch.testing.assert_close(first[1], second[1])
    assert first[2]
    if how == "labels":
        assert len(first[1][1]) == 2 * 24
