"""The learning rate of a run, chosen on held-out training classes.

The best rate for a pretrained network depends on the images: 1e-5 on Flowers 102, 3e-5 on CUB, 1e-4 or 3e-4 on
Stanford Cars (benchmarks/results, 2026-11-19-h200-folder). Where half of the classes train, the best rate of one
set costs another one up to 11 points of R@1. So each rate trains on one half of the training classes and is judged
on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rankgrad.lab.retrieval.images.config import Config
from rankgrad.lab.retrieval.splits import Items

#: Share of the training classes that a rate is judged on.
HELD_OUT = 0.5
#: With fewer training items or classes, those of one item left out, the rate would be chosen by chance, after
#: hardly any steps. With 900 items of 45 classes the choice was right by R@1, on five sets that the rule was made
#: on; fewer were not tried.
FEWEST_ITEMS, FEWEST_CLASSES = 800, 20
ENOUGH = f"{FEWEST_ITEMS} of {FEWEST_CLASSES} classes suffice"
#: Points that the next rate must gain at least, in the mean of R@1 and mAP@R (which depends less on chance). Two
#: seeds differ by 0.4, and with half of the images a run has half of the steps, which favours higher rates. On
#: those three sets the next rate gained more than 1.0, or less than 0.65.
GAIN = 0.7


def trial(config: Config, rate: float) -> Config:
    """The settings of a run that judges a learning rate."""
    changed = {
        "data": config.data.model_copy(update={"hold_out": HELD_OUT}),
        "evaluate_first": False,
        "evaluate_every": config.epochs,
        "callbacks": (),
    }
    return config.with_rate(rate).model_copy(update=changed)


def enough(items: Items) -> bool:
    """Whether rates can be compared on these training items."""
    counts = items.labels.unique(return_counts=True)[1]
    counts = counts[counts > 1]
    return int(counts.sum()) >= FEWEST_ITEMS and len(counts) >= FEWEST_CLASSES


def plan(tried: Sequence[float], otherwise: float) -> str:
    """What will be done, what it costs, and the rate that would train without it."""
    some = " and ".join(f"{rate:g}" for rate in tried[:2])
    more = ", then the next as long as they gain," if len(tried) > 2 else ""
    return (
        f"compares lr={some}{more} on held-out training classes first. Each takes about half as long as the run "
        f"itself; lr={otherwise:g} trains at once"
    )


def choose(config: Config, train: Callable[[str, Config], Mapping[str, float]]) -> tuple[float, str]:
    """The first of ``config.rates`` that the next one does not beat, and a line that says why.

    ``train`` is called with a name and settings; it returns the last evaluation, empty where training failed.
    """
    best, found = config.rates[0], dict[float, Mapping[str, float]]()
    for rate in config.rates:
        found[rate] = train(f"lr-{rate:g}", trial(config, rate))
        if rate != best and _score(found[rate]) < _score(found[best]) + GAIN:
            break
        best = rate
    if not any(found.values()):
        return best, f"lr={best:g}: rates could not be compared, training failed with each of {len(found)}"
    told = ", ".join(f"{rate:g}: {_words(metrics)}" for rate, metrics in found.items())
    told += {min(found): "; a lower one was not tried", max(found): "; a higher one was not tried"}.get(best, "")
    return best, f"lr={best:g} chosen on held-out training classes, R@1 / mAP@R at {told}"


def _score(metrics: Mapping[str, float]) -> float:
    return (metrics["R@1"] + metrics["mAP@R"]) / 2 if metrics else 0.0


def _words(metrics: Mapping[str, float]) -> str:
    return f"{metrics['R@1']:.1f} / {metrics['mAP@R']:.1f}" if metrics else "failed"
