"""The training loop, for any task.

A resumed run equals one that was never stopped, a run in several processes equals one in a single process, and a
loss that is not finite stops the run.

Nothing random is carried from step to step: each step seeds the generators from (seed, step, process), and a batch
is a function of the step. So the state to save is the step, the weights, the optimiser and the loss's own state.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad._check import NotANumberError
from rankgrad.lab import callbacks
from rankgrad.lab.training import checkpoint, log, optim, signals
from rankgrad.lab.training.config import RunConfig
from rankgrad.lab.training.errors import Interrupted, TrainingError, UserError
from rankgrad.lab.training.run_files import Result, State, checked
from rankgrad.lab.training.seeding import seed_step
from rankgrad.lab.training.task import Task

#: Losses are read from a GPU once in so many steps: reading waits for it.
READ_EVERY = 20
#: How much more work an item is in training, forward and backward, than in an evaluation, forward alone.
_TRAINING_WORK = 3
#: ``evaluate_every=auto``: the share of the training time that evaluations may take, and their least number.
_SHARE, _FEWEST = 0.1, 5


def epochs_between(setting: int | str, trained: float, tested: float, epochs: int) -> int:
    """Epochs from one evaluation to the next: as set, or by the items of an epoch and of an evaluation."""
    if isinstance(setting, int):
        return setting
    work = tested / (_TRAINING_WORK * trained)
    return max(1, min(math.ceil(work / _SHARE), epochs // _FEWEST))


class _Speed:
    """Steps per second since a step. Evaluations and checkpoints are left out: after each, a new one begins."""

    def __init__(self, step: int) -> None:
        self._since, self._from_step = time.monotonic(), step

    def steps_per_second(self, step: int) -> float:
        """The speed up to this step."""
        return (step - self._from_step) / (time.monotonic() - self._since)


class Trainer:
    """One run of a task in a folder.

    Args:
        task: What is trained.
        config: How.
        folder: Where the run's files go.
        device: Where the task's tensors are.
    """

    def __init__(self, task: Task, config: RunConfig, folder: Path, device: torch.device) -> None:
        self.task, self.config, self.folder, self.device = task, config, folder, device
        torch.backends.cudnn.benchmark = task.same_shapes
        self.optimizer = optim.make_optimizer(task.parameter_groups(), config.optim)
        trained = task.items_per_step * task.steps_per_epoch
        self.evaluate_every = epochs_between(config.evaluate_every, trained, task.tested_items, config.epochs)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.step = 0
        self.result = Result()
        self.log: log.Log | None = None  # in the process that writes
        self.callbacks = callbacks.build(config.callbacks) if distributed.process_index() == 0 else []
        #: Rows of the last steps for ``steps.csv``, with the scalars that are still on the device.
        self._unread: list[tuple[dict[str, float], dict[str, Tensor]]] = []
        self._warnings: list[str] = []  # lines of :meth:`Task.watch` that are not printed yet

    @property
    def state_file(self) -> Path:
        """The file a run resumes from."""
        return self.folder / "state.pt"

    def fit(self, *, resume: bool = False, previous: bool = False) -> Result:
        """Train to the end; with ``resume`` from the last checkpoint, if any, or from the ``previous`` one.

        A signal that asks to stop (:mod:`rankgrad.lab.training.signals`) ends the run after the step at hand with
        :class:`~rankgrad.lab.training.errors.Interrupted`, and the run is saved.
        """
        if resume:
            self._resume(previous)
        network = self._wrapped()
        writes = distributed.process_index() == 0
        if writes:
            self.log = log.Log(self.folder, self.step, int(self.result.last.get("step", -1)), self.callbacks)
        try:
            for callback in self.callbacks:
                callback.begin(self.folder, self.config.model_dump(mode="json"), self.step)
            with log.progress(str(self.folder), self._total, self.step, show=writes) as bar:
                self._train(network, bar)
        finally:
            if self.log is not None:
                self.log.close()
        self._finish()
        return self.result

    @property
    def _total(self) -> int:
        return self.config.epochs * self.task.steps_per_epoch

    def _epoch_ends(self) -> bool:
        return self.step > 0 and self.step % self.task.steps_per_epoch == 0

    def _evaluation_is_due(self) -> bool:
        """Whether this step is to be evaluated and is not yet: a run may have been stopped in between."""
        if self.result.last.get("step") == self.step:
            return False
        if self.step == 0:
            return self.config.evaluate_first
        epoch = self.step // self.task.steps_per_epoch
        return self._epoch_ends() and (epoch % self.evaluate_every == 0 or self.step == self._total)

    def _ended(self) -> bool:
        return self.step >= self._total and not self._evaluation_is_due()

    def _losses_are_read(self) -> bool:
        """Whether the losses are read from the device after this step. All processes give the same answer."""
        return self.device.type == "cpu" or self.step % READ_EVERY == 0 or self._epoch_ends()

    def _train(self, network: nn.Module, bar: log.Progress) -> None:
        """Steps and evaluations to the end, or until a signal asks to stop; checkpoints in between."""
        begin, saved = time.monotonic() - self.result.seconds, time.monotonic()
        with signals.noted() as stop:
            speed = _Speed(self.step)
            while not self._ended():
                if self._evaluation_is_due():
                    with suppress(Interrupted):  # the step is done, and a resumed run evaluates it
                        self._evaluate(bar, stop)
                    speed = _Speed(self.step)
                else:
                    self._train_step(network)
                    if self._losses_are_read():
                        self._show_losses(bar)
                    if self._epoch_ends():
                        self.result.speed = speed.steps_per_second(self.step) * self.task.items_per_step
                        speed = _Speed(self.step)
                self.result.seconds = time.monotonic() - begin
                signal = self._signal(stop)
                if self._ended() or signal or time.monotonic() - saved >= 60 * self.config.save_minutes:
                    if self.step:
                        self._save()
                    saved, speed = time.monotonic(), _Speed(self.step)
                if signal:
                    distributed.wait()  # until it is saved: torchrun ends all processes when one has ended
                    raise Interrupted(signal)

    def _signal(self, stop: signals.Stop) -> int:
        """The signal that asks to stop, or 0; several processes agree on it only where a GPU waits in any case."""
        return stop.agreed(self.device) if self._losses_are_read() or not distributed.active() else 0

    def _wrapped(self) -> nn.Module:
        network: nn.Module = self.task.network
        if distributed.active():
            network = nn.parallel.DistributedDataParallel(
                network, device_ids=[self.device.index] if self.device.type == "cuda" else None
            )
        if not self.config.compile or self.device.type != "cuda":
            return network
        # Recorded as CUDA graphs: a ResNet-50 step of 128 images is 16 ms for an H200, 27 ms for Python.
        mode = None if distributed.active() else "reduce-overhead"
        # One shape, so no graph for any size where a batch differs from that of a run before (rates).
        dynamic = False if self.task.same_shapes else None
        return torch.compile(network, mode=mode, dynamic=dynamic)  # type: ignore[return-value]

    def _train_step(self, network: nn.Module) -> None:
        config = self.config
        seed_step(config.seed, self.step)
        network.train()
        self.task.loss.train()
        schedule = config.optim, self.step, self.task.steps_per_epoch, config.epochs
        rate = optim.learning_rate(*schedule)
        optim.set_rates(self.optimizer, *schedule)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with optim.autocast(config.precision, self.device):
                loss = self.task.batch_loss(network, self.step)
        except NotANumberError:
            raise self._not_finite(math.nan, self.step + 1, rate) from None
        self.scaler.scale(loss).backward()
        optim.hold_back(self.optimizer)
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, config.optim.clip or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        row = {"step": float(self.step), "epoch": (self.step - 1) // self.task.steps_per_epoch + 1.0, "lr": rate}
        scalars = {"loss": loss, "gradient_norm": norm, **self.task.parts}
        self._unread.append((row, {name: value.detach().float() for name, value in scalars.items()}))

    def _show_losses(self, bar: log.Progress) -> None:
        """Read the losses, show the last one, and print what the task warns of."""
        bar.advance(self.step, self._read_losses())
        for line in self._warnings:
            bar.say(line)
        self._warnings.clear()

    def _read_losses(self) -> str:
        """Log the losses of the last steps, stop if one is not finite; returns the last one as text."""
        if not self._unread:
            return ""
        names = list(self._unread[0][1])
        # One tensor of all scalars: one transfer from the device.
        values = torch.stack([scalars[name] for _, scalars in self._unread for name in names])
        rows = [
            {**row, **dict(zip(names, numbers, strict=True))}
            for (row, _), numbers in zip(self._unread, values.reshape(-1, len(names)).tolist(), strict=True)
        ]
        self._unread.clear()
        finite = [row for row in rows if math.isfinite(row["loss"])]
        if self.log is not None:
            self.log.add_steps(finite)
        for row in rows:
            if not math.isfinite(row["loss"]):
                raise self._not_finite(row["loss"], int(row["step"]), row["lr"])
        self._warnings += self.task.watch(finite)
        return f"loss {rows[-1]['loss']:.4f}"

    def _not_finite(self, loss: float, step: int, rate: float) -> TrainingError:
        epoch = (step - 1) // self.task.steps_per_epoch + 1
        kept = f"The checkpoint before it is {self.state_file}" if self.state_file.is_file() else "No checkpoint"
        return TrainingError(
            f"loss: {loss} at step {step} (epoch {epoch}, learning rate {rate:.3g}), training stopped",
            f"{kept}. Try a lower lr, optim.clip, or precision=fp32.",
        )

    def _evaluate(self, bar: log.Progress, stop: signals.Stop) -> None:
        bar.advance(self.step, "evaluating")
        distributed.share_buffers(self.task.network)
        with stop.interruptible():
            metrics = self.task.evaluate()
        epoch = self.step // self.task.steps_per_epoch
        if self.task.headline not in metrics:
            raise AssertionError(f"{self.task.headline} is not among {sorted(metrics)}")
        value = metrics[self.task.headline]
        if not math.isfinite(value):
            raise UserError(
                f"{self.task.headline}: {value} after step {self.step} (epoch {epoch}), training stopped: it must "
                "choose the best checkpoint. Is there something to find in the test data?"
            )
        bar.advance(self.step, log.in_words({self.task.headline: value}))
        row = {"step": float(self.step), "epoch": float(epoch), **metrics}
        self.result.last = row
        if self.step == 0:
            self.result.first = row
        if self._order(row) >= self._order(self.result.best):  # of equals the one that was trained longer
            self.result.best = row
            if self.log is not None:
                self._save_weights("best", row)
        if self.log is not None:
            self.log.add_evaluation(row)
        bar.say(f"epoch {epoch:3d}  {log.in_words(metrics)}")

    def _order(self, row: dict[str, float]) -> tuple[float, float]:
        """The key by which evaluations are compared: the headline metric, then the one that breaks ties."""
        return row.get(self.task.headline, -math.inf), row.get(self.task.tie_break, -math.inf)

    def _save_weights(self, name: str, row: dict[str, float]) -> None:
        settings = {"config": self.config.model_dump(mode="json"), "metrics": row, **self.task.metadata()}
        checkpoint.save_weights(self.folder / f"{name}.safetensors", self.task.network, settings)

    def _save(self) -> None:
        self._read_losses()  # a checkpoint is only written of finite losses
        if self.log is None:
            return
        self._save_weights("last", {**self.result.last, "step": float(self.step)})
        state = {
            "step": self.step,
            "network": self.task.network.state_dict(),
            "loss": self.task.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "result": vars(self.result),
        }
        checkpoint.save_state(self.state_file, state)

    def _resume(self, previous: bool) -> None:
        """Load the last checkpoint or the one before it; the error of a damaged one says if there is another."""
        before = checkpoint.previous_of(self.state_file)
        if previous:
            if not before.is_file():
                raise UserError(f"--previous: there is no checkpoint {before}")
            state = self._state(before)
            distributed.wait()
            if distributed.process_index() == 0:
                os.replace(before, self.state_file)  # the damaged one is not kept as the next previous one
            distributed.wait()
        elif self.state_file.is_file():
            try:
                state = self._state(self.state_file)
            except UserError as error:
                raise UserError(f"{error}; {self._advice(before)}") from None
        elif before.is_file():  # stopped between two renames, where a file system has no hard links
            state = self._state(before)
        else:
            return
        self._restore(state)
        self.task.watch([row for row in log.read_table(self.folder / "steps.csv") if row["step"] <= self.step])
        if self.result.best:
            checkpoint.load_weights(self.folder / "best.safetensors")  # known to be whole before hours are spent

    def _state(self, path: Path) -> State:
        state: State = checked(checkpoint.load_state(path), State, f"--resume: {path}")
        return state

    def _advice(self, before: Path) -> str:
        """Whether a run whose last checkpoint is damaged can continue from the one before it."""
        if before.is_file():
            with suppress(UserError):
                step = self._state(before)["step"]
                return f"--resume --previous continues from the checkpoint before it, of step {step:,}"
        return "the previous checkpoint is missing or damaged"

    def _restore(self, state: State) -> None:
        try:
            self.task.network.load_state_dict(state["network"])
            self.task.loss.load_state_dict(state["loss"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            said = " ".join(str(error).split())[:200]
            raise UserError(f"--resume: {self.state_file} does not fit this run ({said})") from None
        self.step, self.result = state["step"], state["result"]

    def _finish(self) -> None:
        """Leave what the report shows, made with the best weights."""
        distributed.wait()
        weights, _ = checkpoint.load_weights(self.folder / "best.safetensors")
        self.task.network.load_state_dict(weights)
        self.task.finish(self.folder)
