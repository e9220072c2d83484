"""Compare ranker losses on MQ2008 (LETOR 4.0): five folds, every loss at the setting its validation fold chooses.

    python -m benchmarks.ranker --data DIR --out runs/ranker [--rows 'ap|ndcg'] [--seeds 3] [-- key=value ...]

DIR has S1.txt ... S5.txt, or a zip file of them. Fold i trains on three of these files, validates on the fourth
and tests on the fifth, as LETOR's folds do. All networks are trained by the same loop: the recipe ``ranker`` with
the settings of the row, best epoch by validation NDCG@10. A setting is chosen, fold by fold, by the mean over
seeds of validation NDCG@10; test queries choose nothing. Finished trainings are kept in OUT/trainings.jsonl, so
that a run that was stopped goes on.

Figures follow LETOR: queries without a relevant item count, as 0. Gain of NDCG 2^grade - 1.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankgrad.lab import recipes
from rankgrad.lab.ranker.data import Queries
from rankgrad.lab.ranker.task import RankerTask, figures, read
from rankgrad.lab.training import machine, optim
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.seeding import seed_step

FILES = 5
METRICS = ("NDCG@10", "MAP", "MRR")
#: A linear model and a network, at rates that suit them.
NETWORKS = ("hidden=[] lr=1e-2", "hidden=[] lr=3e-2", "hidden=[64,32] lr=1e-3")

#: The one number of each loss that has the unit of a score, by factors of two; the same many for all.
_SCALES = (0.5, 1, 2, 4)
#: Row -> its settings to choose from; each is tried with every network.
ROWS: dict[str, list[str]] = {
    "ap, automatic": ["loss=ap loss.margin=auto"],
    "ap, by window": [f"loss=ap loss.window={w} loss.margin={w / 2}" for w in _SCALES],
    "ndcg, automatic": ["loss=ndcg loss.margin=auto loss.gain=exponential"],
    "ndcg, by window": [f"loss=ndcg loss.gain=exponential loss.window={w} loss.margin={w / 2}" for w in _SCALES],
    "recall, automatic": ["loss=recall loss.margin=auto"],
    "LambdaRank": [f"loss=lambdarank loss.sigma={1 / w}" for w in _SCALES],
    "ListNet": ["loss=listnet"],
    "RankNet": [f"loss=ranknet loss.sigma={1 / w}" for w in _SCALES],
    "ApproxNDCG": [f"loss=approxndcg loss.temperature={w / 4}" for w in _SCALES],
}
#: The same for trees: arguments of LightGBM.
_TREES = [{"num_leaves": n, "min_data_in_leaf": m, "learning_rate": 0.05} for n in (7, 15, 31) for m in (20, 100)]
TREES: dict[str, list[dict[str, Any]]] = {
    "LightGBM lambdarank": [{"objective": "lambdarank", **one} for one in _TREES],
    "LightGBM, gradients of ap": [{"objective": "ap", **one} for one in _TREES],
}


def fold_files(folder: Path, to: Path) -> list[Path]:
    """The five folds as folders with train, vali and test files."""
    parts = {f"S{number}.txt": b"" for number in range(1, FILES + 1)}
    for path in [*folder.glob("S?.txt"), *folder.glob("*.zip")]:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                parts |= {name: archive.read(name) for name in archive.namelist() if name in parts}
        elif path.name in parts:
            parts[path.name] = path.read_bytes()
    if missing := [name for name, content in parts.items() if not content]:
        raise SystemExit(f"--data: no {', '.join(missing)} in {folder}")
    texts = list(parts.values())
    folds = []
    for number in range(FILES):
        turn = [texts[(number + at) % FILES] for at in range(FILES)]
        fold = to / f"fold{number + 1}"
        fold.mkdir()
        for name, content in (("train", b"".join(turn[:3])), ("vali", turn[3]), ("test", turn[4])):
            (fold / f"{name}.txt").write_bytes(content)
        folds.append(fold)
    return folds


def as_letor(found: dict[str, float], queries: Queries) -> dict[str, float]:
    """Means over all queries, those without anything relevant as 0, from means over the others."""
    counted = len(queries.groups[queries.grades > 0].unique()) / len(queries)
    return {name: counted * found[name] for name in METRICS}


def train_network(settings: str, fold: Path, seed: int) -> dict[str, Any]:
    """Validation and test figures at the epoch with the best validation NDCG@10."""
    _, config = recipes.load("ranker", [*settings.split(), f"seed={seed}", f"data.root={fold}", "device=cpu"])
    device = torch.device("cpu")
    task = RankerTask(config, device)
    optimizer = optim.make_optimizer(task.parameter_groups(), config.optim)
    best: dict[str, Any] = {"validation": {"NDCG@10": -1.0}}
    for step in range(config.epochs * task.steps_per_epoch):
        seed_step(seed, step)
        task.network.train()
        optim.set_rates(optimizer, config.optim, step, task.steps_per_epoch, config.epochs)
        optimizer.zero_grad(set_to_none=True)
        task.batch_loss(task.network, step).backward()
        optimizer.step()
        epoch, rest = divmod(step + 1, task.steps_per_epoch)
        if rest == 0 and epoch % config.evaluate_every == 0:
            found = {name: task.measure(name) for name in ("validation", "test")}
            if found["validation"]["NDCG@10"] > best["validation"]["NDCG@10"]:
                best = {"epoch": epoch, **found}
    parts = {"validation": task.validation, "test": task.test}
    return {"epoch": best["epoch"], **{name: as_letor(best[name], part) for name, part in parts.items()}}


def train_trees(settings: dict[str, Any], fold: Path, seed: int) -> dict[str, Any]:
    """The same for LightGBM: the number of trees that is best by validation NDCG@10."""
    import lightgbm

    from examples.lightgbm_objective import average_precision

    _, config = recipes.load("ranker", [f"data.root={fold}"])
    split = read(config.data)
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    sets = {
        name: lightgbm.Dataset(q.features.numpy(), q.grades.numpy(), group=q.sizes.numpy(), free_raw_data=False)
        for name, q in parts.items()
    }
    settings = {**settings, "objective": average_precision if settings["objective"] == "ap" else "lambdarank"}
    settings |= {"metric": "ndcg", "eval_at": [10], "num_threads": 1, "verbosity": -1, "seed": seed}
    settings |= {"bagging_fraction": 0.8, "bagging_freq": 1, "feature_fraction": 0.8}
    stop = lightgbm.early_stopping(50, verbose=False)
    trees = lightgbm.train(settings, sets["train"], 500, valid_sets=[sets["validation"]], callbacks=[stop])
    found: dict[str, Any] = {"epoch": trees.best_iteration}
    for name in ("validation", "test"):
        scores = trees.predict(parts[name].features.numpy(), num_iteration=trees.best_iteration)
        found[name] = as_letor(figures(torch.from_numpy(scores), parts[name], config), parts[name])
    return found


def chosen(trainings: list[dict[str, Any]]) -> tuple[list[str], dict[int, dict[str, float]], float]:
    """The setting of each fold, test figures of each seed as means over folds, and the validation NDCG@10."""
    settings, rows, validation = [], [], []
    for fold in sorted({one["fold"] for one in trainings}):
        here = [one for one in trainings if one["fold"] == fold]
        means = {
            name: statistics.fmean(one["validation"]["NDCG@10"] for one in here if one["settings"] == name)
            for name in dict.fromkeys(one["settings"] for one in here)
        }
        best = max(means, key=lambda name: means[name])
        settings.append(best)
        validation.append(means[best])
        rows += [one for one in here if one["settings"] == best]
    seeds = {
        seed: {m: statistics.fmean(one["test"][m] for one in rows if one["seed"] == seed) for m in METRICS}
        for seed in sorted({one["seed"] for one in rows})
    }
    return settings, seeds, statistics.fmean(validation)


def table(trainings: list[dict[str, Any]]) -> str:
    """The chosen setting of every row, and below it every setting alone."""
    told = "| loss | NDCG@10 | MAP | MRR | validation NDCG@10 | chosen, by fold |\n|---|---|---|---|---|---|\n"
    lines = {}
    for row in dict.fromkeys(one["row"] for one in trainings):
        settings, seeds, validation = chosen([one for one in trainings if one["row"] == row])
        names = ", ".join(f"`{name}` x {settings.count(name)}" for name in dict.fromkeys(settings))
        cells = " | ".join(_spread([one[metric] for one in seeds.values()]) for metric in METRICS)
        mean = statistics.fmean(one["NDCG@10"] for one in seeds.values())
        lines[f"| {row} | {cells} | {validation / 100:.4f} | {names} |\n"] = mean
    told += "".join(sorted(lines, key=lambda line: -lines[line]))
    told += "\nEvery setting alone, means over folds and seeds:\n\n"
    told += (
        "| loss | settings | NDCG@10 | MAP | validation NDCG@10 | epoch or trees |\n|---|---|---|---|---|---|\n"
    )
    for row, name in dict.fromkeys((one["row"], one["settings"]) for one in trainings):
        here = [one for one in trainings if (one["row"], one["settings"]) == (row, name)]
        means = [statistics.fmean(one["test"][m] for one in here) for m in ("NDCG@10", "MAP")]
        means.append(statistics.fmean(one["validation"]["NDCG@10"] for one in here))
        epoch = statistics.fmean(one["epoch"] for one in here)
        told += f"| {row} | `{name}` | {' | '.join(f'{value / 100:.4f}' for value in means)} | {epoch:.0f} |\n"
    return told


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values) / 100:.4f} ± {deviation / 100:.4f}"


def main() -> None:
    """Train what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/ranker-benchmark"))
    parser.add_argument("--rows", default="", help="only rows whose name has this in it (a regular expression)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="settings of all networks, e.g. epochs=40")
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs: list[tuple[str, str, Callable[[Path, int], dict[str, Any]]]] = []
    for row, own in ROWS.items():
        for settings in [f"{one} {network}" for one in own for network in NETWORKS]:
            whole = " ".join([settings, *given.settings])
            jobs.append((row, settings, lambda fold, seed, whole=whole: train_network(whole, fold, seed)))  # type: ignore[misc]
    for row, arguments in TREES.items():
        for one in arguments:
            name = " ".join(f"{key}={value}" for key, value in one.items() if key != "objective")
            jobs.append((row, name, lambda fold, seed, one=one: train_trees(one, fold, seed)))  # type: ignore[misc]
    jobs = [job for job in jobs if re.search(given.rows, job[0])]
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.out / "trainings.jsonl"
    trainings = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    done = {(one["row"], one["settings"], one["fold"], one["seed"]) for one in trainings}
    with tempfile.TemporaryDirectory() as place, kept.open("a") as file:
        folds = fold_files(given.data, Path(place))
        for seed in range(given.seeds):
            for number, fold in enumerate(folds, 1):  # a fold is read once for all rows
                for row, settings, train in jobs:
                    key = (row, settings, number, seed)
                    if key in done:
                        continue
                    begin = time.perf_counter()
                    found = dict(zip(("row", "settings", "fold", "seed"), key, strict=True)) | train(fold, seed)
                    found["seconds"] = time.perf_counter() - begin
                    trainings.append(found)
                    file.write(json.dumps(found) + "\n")
                    file.flush()
            print(f"seed {seed} done", flush=True)
    described = machine.describe(torch.device("cpu"))
    text = table(trainings) + "\n" + "\n".join(f"{key}: {value}" for key, value in described.items()) + "\n"
    write_text(given.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
