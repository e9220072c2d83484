"""What the trainer needs beside a loss: batches of P labels x K texts, and checkpoints of the loss's state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.model import BaseModel
from torch import Tensor, nn
from transformers import TrainerCallback

from rankgrad import _check
from rankgrad.samplers import ClassSampler


class ClassBatches:
    """P labels x K texts a batch: ``batch_sampler=ClassBatches(per_class=4)`` in the training arguments.

    Every label comes as often as the others and every text of a label as often, seeded and resumed by the trainer.
    The batch size is the one of the training arguments, rounded down to whole labels.

    Args:
        per_class: K.
        column: The column of the labels, integers or strings; None: the one the trainer takes for the label.

    Example:
        >>> from rankgrad.integrations.sentence_transformers import ClassBatches
        >>> ClassBatches(per_class=4)  # batch_sampler= of SentenceTransformerTrainingArguments
        ClassBatches(per_class=4, column=None)
    """

    def __init__(self, per_class: int, column: str | None = None) -> None:
        self.per_class, self.column = _check.count("per_class", per_class, at_least=1), column

    def __call__(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool = True,
        valid_label_columns: Sequence[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> ClassSampler:
        """The sampler of a data set, as the trainer calls it; all its batches are full."""
        names = list(valid_label_columns or ()) if self.column is None else [self.column]
        found = next((name for name in names if name in dataset.column_names), None)
        if found is None:
            raise _check.fail(
                "column",
                f"one of the columns {dataset.column_names}, as in ClassBatches({self.per_class}, column=...)",
                self.column or names,
            )
        values = list(dataset[found])
        # The trainer makes a tensor of its label column.
        if found in (valid_label_columns or ()) and isinstance(values[0], str):
            raise _check.fail(found, f"integers (dataset.class_encode_column({found!r}) makes them)", values[0])
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        if len(numbers) == len(values):
            raise _check.fail(found, "labels of which some texts have the same", f"{len(values)} different ones")
        if len(numbers) < 2:
            raise _check.fail(found, "two different labels at least", values[0])
        size = min(batch_size // self.per_class, len(numbers)) * self.per_class
        if not size:
            raise _check.fail("batch_size", f"at least per_class = {self.per_class}", batch_size)
        if size < batch_size - batch_size % self.per_class:
            message = f"ClassBatches: {len(numbers)} labels x {self.per_class} texts: batches of {size}"
            warnings.warn(message, stacklevel=2)
        labels = [numbers[value] for value in values]
        return ClassSampler(labels, size=size, per_class=self.per_class, seed=seed, shard=False)

    def __repr__(self) -> str:
        return f"ClassBatches(per_class={self.per_class}, column={self.column!r})"


class LossCheckpoint(TrainerCallback):
    """Saves the state of a loss (memory, proxies) in every checkpoint of the trainer, and resumes it.

    The trainer saves the model and the optimiser only. Give the callback the loss, whole:
    ``SentenceTransformerTrainer(..., loss=loss, callbacks=[LossCheckpoint(loss)])``. Every process writes its own
    ``loss_state_PROCESS.pt`` beside the model.

    Args:
        loss: The loss, or the dictionary of losses, that the trainer has.
        resume_from: The checkpoint that ``train(resume_from_checkpoint=...)`` is given, where it is not in the
            output folder of this run.

    Example:
        >>> from rankgrad.integrations.sentence_transformers import LossCheckpoint
        >>> callback = LossCheckpoint(rankgrad.ProxyRankingLoss(num_classes=4, embedding_size=8))
    """

    def __init__(self, loss: nn.Module | Mapping[str, nn.Module], resume_from: str | Path | None = None) -> None:
        losses = loss if isinstance(loss, Mapping) else {"loss": loss}
        if not all(isinstance(one, nn.Module) for one in losses.values()):
            raise _check.fail("loss", "a loss Module or a dictionary of them", loss)
        self.losses, self.resume_from = losses, resume_from

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """Of every loss, all but the model it trains."""
        state = {}
        for name, loss in self.losses.items():
            models = tuple(
                f"{path}."
                for path, module in loss.named_modules(remove_duplicate=False)
                if isinstance(module, BaseModel)
            )
            state[name] = {key: value for key, value in loss.state_dict().items() if not key.startswith(models)}
        return state

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state into the checkpoint that was just saved."""
        path = self._path(Path(args.output_dir) / f"checkpoint-{state.global_step}", args)
        part = path.with_suffix(".part")
        torch.save(self._state(), part)
        os.replace(part, path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the state of the checkpoint that training goes on from."""
        if not state.global_step:
            return
        folder = self.resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}"
        path = self._path(Path(folder), args)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no state of the loss there. Use LossCheckpoint(loss, resume_from=CHECKPOINT) where "
                "training goes on from another folder; a checkpoint written without this callback has none"
            )
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved.keys() != self.losses.keys():
            raise _check.fail("loss", f"the losses of {path}, {sorted(saved)}", sorted(self.losses))
        for name, loss in self.losses.items():
            found = loss.load_state_dict(saved[name], strict=False)
            missing = self._state()[name].keys() - saved[name].keys()
            if missing or found.unexpected_keys:
                expected = f"the state in {path}"
                raise _check.fail(f"loss {name}", expected, sorted([*missing, *found.unexpected_keys]))

    def _path(self, folder: Path, args: Any) -> Path:
        return folder / f"loss_state_{args.process_index}.pt"
