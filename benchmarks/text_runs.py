"""The runs of :mod:`benchmarks.text`: data, batches, one training of a bi-encoder."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rankgrad
from rankgrad.integrations.sentence_transformers import RankingLoss
from rankgrad.metrics import retrieval_metrics, spearman
from rankgrad.samplers import ClassSampler

EVERY = 25  # steps between two evaluations
WARM_UP = 20


@dataclass(frozen=True)
class Setting:
    """One way to train: the method, its rate, the batch, and what the method itself has to choose."""

    method: str
    lr: float
    batch: int = 128
    per_class: int = 0  # 0: pairs at random, as (anchor, positive)
    options: tuple[tuple[str, float | str], ...] = ()

    def __str__(self) -> str:
        batch = f"{self.batch // self.per_class} x {self.per_class}" if self.per_class else f"{self.batch}"
        return ", ".join([f"lr {self.lr:g}", f"batch {batch}", *(f"{k} {v}" for k, v in self.options)])


# Losses


def baseline(name: str, model: nn.Module, **options: Any) -> nn.Module:
    """A loss of sentence-transformers; triplets by cosine distance, which suits embeddings of unit length."""
    from sentence_transformers.sentence_transformer import losses

    if name.startswith("BatchHard"):
        options["distance_metric"] = losses.BatchHardTripletLossDistanceFunction.cosine_distance
    return getattr(losses, name)(model, **options)


def ours(make: Callable[..., Any], model: nn.Module, **options: Any) -> nn.Module:
    return RankingLoss(model, make(**options))


def proxies(model: Any, classes: int, **options: Any) -> nn.Module:
    return RankingLoss(model, rankgrad.ProxyRankingLoss(classes, model.get_embedding_dimension(), **options))


LOSSES: dict[str, Callable[..., nn.Module]] = {
    "rankgrad AP": partial(ours, rankgrad.AveragePrecisionLoss),
    "rankgrad recall": partial(ours, rankgrad.RecallLoss),
    "rankgrad proxies": proxies,
    "MultipleNegativesRanking": partial(baseline, "MultipleNegativesRankingLoss"),
    "MultipleNegativesRanking, P x K": partial(baseline, "MultipleNegativesRankingLoss"),
    "BatchHardTriplet": partial(baseline, "BatchHardTripletLoss"),
    "BatchHardSoftMarginTriplet": partial(baseline, "BatchHardSoftMarginTripletLoss"),
    "rankgrad Spearman": partial(ours, partial(partial, rankgrad.spearman_loss)),
    "CoSENT": partial(baseline, "CoSENTLoss"),
    "CosineSimilarity": partial(baseline, "CosineSimilarityLoss"),
}


# Data


@dataclass
class Texts:
    """Token ids of texts, ``[N, length]`` padded with 0, and a number for each: its class."""

    tokens: Tensor
    labels: Tensor

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        tokens = self.tokens[rows]
        tokens = tokens[:, : int((tokens != 0).sum(1).max())]
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


def tokenised(model: Any, texts: list[str], device: torch.device) -> Tensor:
    return model.tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")[
        "input_ids"
    ].to(device)


def banking77(folder: Path) -> tuple[list[str], list[int], dict[str, set[int]]]:
    """Texts, their intents by number, and the intents of every part."""
    rows = [row for name in ("train", "test") for row in csv.DictReader((folder / f"{name}.csv").open())]
    names = sorted({row["category"] for row in rows})
    order = list(range(len(names)))
    random.Random(0).shuffle(order)
    half = len(order) // 2 + len(order) % 2
    train, third = order[:half], half // 3
    parts = {"fit": train[third:], "choose": train[:third], "train": train, "test": order[half:]}
    labels = [names.index(row["category"]) for row in rows]
    return [row["text"] for row in rows], labels, {name: set(part) for name, part in parts.items()}


def stsb(folder: Path) -> dict[str, tuple[list[str], list[str], list[float]]]:
    parts = {}
    for part in ("train", "dev", "test"):
        lines = (folder / f"sts-{part}.csv").read_text(encoding="utf-8").splitlines()
        rows = [line.split("\t") for line in lines]
        parts[part] = [row[5] for row in rows], [row[6] for row in rows], [float(row[4]) for row in rows]
    return parts


# Training


@lru_cache(maxsize=1)
def start(folder: str, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """The model, and its weights to begin every run from. In bf16 on a GPU; embeddings and losses are float32."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device=str(device), local_files_only=True).float()
    forward = model.forward

    def narrow(features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = forward(features, **kwargs)
        return {**out, "sentence_embedding": out["sentence_embedding"].float()}

    model.forward = narrow
    return model, {key: value.clone() for key, value in model.state_dict().items()}


@torch.inference_mode()
def embed(model: Any, texts: Texts, at_once: int = 512) -> Tensor:
    model.eval()
    lengths = (texts.tokens != 0).sum(1)
    order = lengths.argsort()
    parts = [model(texts.batch(rows))["sentence_embedding"] for rows in order.split(at_once)]
    return torch.cat(parts)[order.argsort()]


def class_batches(texts: Texts, setting: Setting, seed: int) -> Iterator[tuple[list[Tensor], Tensor | None]]:
    """Rows of the columns and labels: P x K texts with their class, or pairs (anchor, positive) without."""
    device = texts.tokens.device
    if setting.method.startswith("MultipleNegatives"):
        if setting.per_class:  # no class twice in a batch: no false negatives
            sampler = ClassSampler(texts.labels, size=setting.batch, per_class=2, seed=seed)
            for step in range(10**9):
                rows = sampler.at(step).to(device).view(-1, 2)
                yield [rows[:, 0], rows[:, 1]], None
        generator = torch.Generator().manual_seed(seed)
        by_class = {int(c): (texts.labels == c).nonzero().flatten().cpu() for c in texts.labels.unique()}
        while True:
            anchors = torch.randperm(len(texts.labels), generator=generator)[: setting.batch // 2]
            choices = [by_class[int(texts.labels[row])] for row in anchors]
            positives = [own[torch.randint(len(own), (), generator=generator)] for own in choices]
            yield [anchors.to(device), torch.stack(positives).to(device)], None
    sampler = ClassSampler(texts.labels, size=setting.batch, per_class=setting.per_class, seed=seed)
    for step in range(10**9):
        rows = sampler.at(step).to(device)
        yield [rows], texts.labels[rows]


def pair_batches(scores: Tensor, setting: Setting, seed: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The first sentences are rows 0 to N - 1, the second ones follow."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(scores), generator=generator).split(setting.batch):
            if len(rows) == setting.batch:
                rows = rows.to(scores.device)
                yield [rows, rows + len(scores)], scores[rows]


def train(
    folder: str,
    setting: Setting,
    seed: int,
    texts: Texts,
    scores: Tensor | None,
    steps: int,
    judge: Callable[..., Any],
) -> list[dict[str, float]]:
    """What ``judge(model)`` says before the first step and after every ``EVERY`` steps."""
    device = texts.tokens.device
    model, weights = start(folder, device)
    model.load_state_dict(weights)
    torch.manual_seed(seed)
    options = dict(setting.options)
    if setting.method == "rankgrad proxies":
        options["classes"] = int(texts.labels.max()) + 1
    loss = LOSSES[setting.method](model, **options).to(device)
    own = [p for name, p in loss.named_parameters() if "proxies" in name]
    groups = [{"params": list(model.parameters())}, {"params": own, "lr": 500 * setting.lr, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=setting.lr, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARM_UP))
    batches = class_batches(texts, setting, seed) if scores is None else pair_batches(scores, setting, seed)
    curve = [judge(model)]
    for step in range(1, steps + 1):
        model.train()
        rows, labels = next(batches)
        value = loss([texts.batch(one) for one in rows], labels)
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        warm.step()
        if step % EVERY == 0 or step == steps:
            curve.append({**judge(model), "loss": float(value.detach()), "step": step})
    return curve


@lru_cache(maxsize=2)
def classes_data(folder: str, data: str, device: torch.device) -> tuple[Texts, dict[str, set[int]]]:
    texts, labels, parts = banking77(Path(data))
    return Texts(tokenised(start(folder, device)[0], texts, device), torch.tensor(labels, device=device)), parts


def of_classes(texts: Texts, classes: set[int]) -> Texts:
    rows = torch.tensor([int(label) in classes for label in texts.labels], device=texts.labels.device)
    return Texts(texts.tokens[rows], texts.labels[rows].unique(return_inverse=True)[1])


def run_classes(
    folder: str, data: str, setting: Setting, seed: int, final: bool, steps: int
) -> list[dict[str, float]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts, parts = classes_data(folder, data, device)
    fit, judged = (of_classes(texts, parts[name]) for name in (("train", "test") if final else ("fit", "choose")))
    if device.type == "cpu":  # a trial without a GPU
        judged = of_classes(judged, set(range(4)))

    def judge(model: Any) -> dict[str, float]:
        return retrieval_metrics(embed(model, judged), judged.labels).summary([1])

    return train(folder, setting, seed, fit, None, steps, judge)


@lru_cache(maxsize=2)
def pairs_data(folder: str, data: str, device: torch.device) -> dict[str, tuple[Texts, Tensor]]:
    model = start(folder, device)[0]
    parts = {}
    for part, (first, second, scores) in stsb(Path(data)).items():
        tokens = tokenised(model, first + second, device)
        parts[part] = Texts(tokens, torch.zeros(len(tokens))), torch.tensor(scores, device=device) / 5
    return parts


def run_pairs(
    folder: str, data: str, setting: Setting, seed: int, final: bool, steps: int
) -> list[dict[str, float]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = pairs_data(folder, data, device)
    judged, target = parts["test" if final else "dev"]

    def judge(model: Any) -> dict[str, float]:
        first, second = embed(model, judged).chunk(2)
        return {"Spearman": 100 * float(spearman(torch.cosine_similarity(first, second), target))}

    return train(folder, setting, seed, *parts["train"], steps, judge)
