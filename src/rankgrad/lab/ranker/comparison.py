"""The baselines of a run: the same network trained for other losses, and LightGBM's lambdarank, on the same data.

They are trained after the run itself, each in a folder of its own in ``baselines/``, where it is resumed from and
where its ``result.json`` says that it is done.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankgrad.lab.ranker import losses, model
from rankgrad.lab.ranker.config import Config
from rankgrad.lab.ranker.data import Queries
from rankgrad.lab.training import log
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.loop import Trainer
from rankgrad.lab.training.named import Named
from rankgrad.lab.training.run_files import Result, read_json_if_there

if TYPE_CHECKING:
    from rankgrad.lab.ranker.task import RankerTask

#: Setting -> what the report calls it.
NAMES = {
    "lambdarank": "LambdaRank",
    "listnet": "ListNet",
    "ranknet": "RankNet",
    "approxndcg": "ApproxNDCG",
    "lightgbm": "LightGBM lambdarank",
}
#: Of LightGBM; the number of trees is the one with the best validation NDCG.
_TREES = {"num_leaves": 15, "learning_rate": 0.05, "min_data_in_leaf": 20}
_MOST_TREES, _PATIENCE = 500, 50


def results(folder: Path, config: Config) -> Iterator[tuple[str, Result]]:
    """The finished baselines of a run, by setting; a baseline of the run's own loss is the run itself."""
    for name in config.baselines:
        result = read_json_if_there(folder / "baselines" / name / "result.json", Result)
        if result is not None and name != config.loss.name:
            yield name, result


def train(task: RankerTask, folder: Path) -> None:
    """Train the baselines that the settings name and that are not finished yet; print why one is left out."""
    done = dict(results(folder, task.config))
    for name in task.config.baselines:
        if name in done or name == task.config.loss.name:
            continue
        place = folder / "baselines" / name
        try:
            result = _trees(task) if name == "lightgbm" else _network(task, name, place)
        except ModuleNotFoundError as error:
            print(f"baseline {name}: left out, {error.name} is not installed (pip install {error.name})")
            continue
        except UserError as error:  # the run itself is whole
            print(f"baseline {name}: left out, {error}")
            continue
        write_text(place / "result.json", json.dumps(vars(result), indent=1))
        done[name] = result
    for trained, result in done.items():
        print(f"{NAMES[trained]}: {log.in_words(result.best)}")


def _network(task: RankerTask, name: str, place: Path) -> Result:
    """The network of the run from the same first weights, in the same batches, with the loss of this name."""
    other = copy.copy(task)
    other.config = task.config.model_copy(update={"loss": Named(name=name), "baselines": (), "callbacks": ()})
    other.loss = losses.build(other.config.loss, other.config.relevant).to(task.device)
    other.network = model.build(len(task.names), task.config.model, task.config.seed).to(task.device)
    other.network.load_state_dict(dict(task.network.named_buffers()), strict=False)  # the scale of the features
    return Trainer(other, other.config, place, task.device).fit(resume=True)


def _trees(task: RankerTask) -> Result:
    """LightGBM's lambdarank on the features that the network sees."""
    import lightgbm

    from rankgrad.lab.ranker.task import figures

    config, begin = task.config, time.monotonic()
    # Its labels are whole numbers with a table of gains: the different grades, numbered.
    grades = torch.cat([part.grades for part in (task.train, task.validation)]).unique()
    gains = grades.double() if config.gain == "linear" else grades.double().exp2() - 1

    def rows(part: Queries) -> lightgbm.Dataset:
        labels = torch.searchsorted(grades, part.grades)
        return lightgbm.Dataset(part.features.cpu().numpy(), labels.cpu().numpy(), group=part.sizes.cpu().numpy())

    settings = {
        **_TREES,
        "objective": "lambdarank",
        "label_gain": gains.tolist(),
        "metric": "ndcg",
        "eval_at": [config.ndcg_at[-1]],
        "seed": config.seed % 2**31,
        "deterministic": True,
        "num_threads": torch.get_num_threads(),
        "verbosity": -1,
    }
    training, validation = rows(task.train), rows(task.validation)
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    try:
        trees = lightgbm.train(settings, training, _MOST_TREES, valid_sets=[validation], callbacks=[stop])
    except lightgbm.basic.LightGBMError as error:
        raise UserError(str(error)) from None
    found = {}
    for name, part in (("validation", task.validation), ("test", task.test)):
        scores = torch.from_numpy(trees.predict(part.features.cpu().numpy(), num_iteration=trees.best_iteration))
        found[name] = figures(scores.to(part.grades.device), part, config)
    row = {"step": float(trees.best_iteration), "epoch": float(trees.best_iteration)}
    row |= {task.headline: found["validation"][f"NDCG@{config.ndcg_at[-1]}"], **found["test"]}
    return Result(best=row, last=row, seconds=time.monotonic() - begin)
