"""Batches: what is in them, the same for the same seed, resumed in the middle, split over processes."""

import copy
import pickle
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rankgrad import distributed
from rankgrad.lab.detection.batches import AspectSampler
from rankgrad.samplers import ClassSampler, SuperLabelSampler

LABELS = torch.arange(40).repeat_interleave(torch.arange(40) % 7 + 1)  # classes of 1 to 7 images
SUPERS = LABELS % 4


def by_class(**kwargs):
    return ClassSampler(LABELS, **{"size": 24, "per_class": 4, **kwargs})


def by_super(**kwargs):
    settings = {"size": 16, "per_class": 4, "batches_per_pair": 3, **kwargs}
    return SuperLabelSampler(LABELS, SUPERS, **settings)


def test_p_classes_of_k_images():
    sampler = by_class()
    assert len(sampler) == len(LABELS) // 24
    for step in range(20):
        groups = LABELS[sampler.at(step)].reshape(6, 4)
        assert (groups == groups[:, :1]).all()
        assert groups[:, 0].unique().numel() == 6  # no class twice
    for rows in sampler.at(0).reshape(6, 4):  # an image comes twice only where the class is too small
        many = int((LABELS[rows[0]] == LABELS).sum())
        assert rows.unique().numel() == min(many, 4)


@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=40)
def test_every_class_and_every_image_as_often_as_the_others(classes, each, per_class, seed):
    labels = torch.arange(classes).repeat(each)
    chosen = max(1, classes // 2)
    sampler = ClassSampler(labels, size=chosen * per_class, per_class=per_class, seed=seed)
    plan = sampler.plan(0)
    drawn = torch.bincount(labels[plan.flatten()], minlength=classes) // per_class
    assert drawn.max() - drawn.min() <= 1
    rows = torch.bincount(plan.flatten(), minlength=len(labels))
    for label in range(classes):
        seen = rows[labels == label]
        assert seen.max() - seen.min() <= 1


def test_pairs_of_super_labels():
    sampler = by_super()
    assert len(sampler) == 6 * 3
    plan = sampler.plan(0)
    halves = SUPERS[plan].reshape(-1, 2, 8)
    assert (halves == halves[..., :1]).all()
    pairs = [tuple(sorted(pair)) for pair in halves[..., 0].tolist()]
    assert pairs[::3] == pairs[1::3] == pairs[2::3]  # consecutive batches of one pair
    assert sorted(pairs[::3]) == [(a, b) for a in range(4) for b in range(a + 1, 4)]
    groups = plan.reshape(-1, 4)
    assert (LABELS[groups] == LABELS[groups[:, :1]]).all()


def test_the_circular_lists_of_groups_go_on_across_pairs():
    sampler = by_super()
    plan = sampler.plan(3).reshape(-1, 2, 2, 4)
    for over in range(4):
        expected = sum(-(-int((c == LABELS).sum()) // 4) for c in LABELS[over == SUPERS].unique())
        taken = [tuple(g.tolist()) for b in plan for half in b if SUPERS[half[0, 0]] == over for g in half]
        assert len(set(taken)) == expected  # every group of the super-label is used
        assert all(taken[i] == taken[i + expected] for i in range(len(taken) - expected))
        images = torch.tensor(sorted(set(taken))).flatten().unique()
        assert torch.equal(images, (over == SUPERS).nonzero().flatten())


def test_the_official_epochs():
    """12 super-labels of Stanford Online Products: 66 pairs x 10; 23 of In-shop: 253 x 4."""
    for many, per_pair, batches in ((12, 10, 660), (23, 4, 1012)):
        supers = torch.arange(many).repeat_interleave(4)
        sampler = SuperLabelSampler(supers, supers, size=8, per_class=4, batches_per_pair=per_pair)
        assert len(sampler) == batches == len(sampler.plan(0))


@pytest.mark.parametrize("make", [by_class, by_super])
def test_seeded_and_resumed_in_the_middle_of_an_epoch(make):
    sampler = make(seed=5)
    batches = [batch for _ in range(3) for batch in sampler]
    assert len(batches) == 3 * len(sampler)
    assert batches[: len(sampler)] != batches[len(sampler) : 2 * len(sampler)]
    assert [b for _ in range(3) for b in make(seed=6)] != batches
    stop = len(sampler) + 2
    first = make(seed=5)
    seen = list(first) + list(islice(iter(first), 2))
    second = make(seed=5)
    second.load_state_dict(first.state_dict())
    assert seen + list(second) + list(second) == batches
    assert torch.equal(make(seed=5).at(stop), torch.tensor(batches[stop]))


def by_aspect(**kwargs):
    ratios = torch.linspace(0.5, 2.0, len(LABELS), device="cpu")
    return AspectSampler(ratios, **{"size": 24, **kwargs})


@pytest.mark.parametrize("make", [by_class, by_super, by_aspect])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_draws_its_own_batches(make, copied):
    sampler = make(seed=5)
    seen = list(islice(iter(sampler), 2))
    other = copied(sampler)
    other.seed = 6
    assert torch.equal(other.at(0), make(seed=6).at(0))
    other.seed = 5
    other.load_state_dict({"step": 0})
    assert list(islice(iter(other), 2)) == seen
    assert sampler.step == 2


def test_an_epoch_is_planned_once():
    sampler, planned = by_class(), []
    real = sampler.plan
    sampler.plan = lambda epoch: planned.append(epoch) or real(epoch)
    for step in range(2 * len(sampler)):
        sampler.at(step)
        sampler.at(step + 1)  # as loaders do, ahead
    assert planned == [0, 1, 2]
    assert len(sampler._plans) == 2


@pytest.mark.parametrize("make", [by_class, by_super, by_aspect])
def test_the_default_device_does_not_matter(make):
    with torch.device("meta"):
        plan = make().plan(1)
    assert torch.equal(plan, make().plan(1))


def test_resumed_behind_a_loader_that_draws_ahead():
    """As the docstring says: by the count of steps, not by what the sampler has given to the workers."""
    rows = TensorDataset(torch.arange(len(LABELS)))
    sampler = by_class()
    loader = iter(DataLoader(rows, batch_sampler=sampler, num_workers=1))
    seen = [next(loader)[0].tolist() for _ in range(2)]
    assert sampler.state_dict()["step"] > len(seen)
    again = by_class()
    again.load_state_dict({"step": len(seen)})
    (batch,) = next(iter(DataLoader(rows, batch_sampler=again)))
    assert [*seen, batch.tolist()] == list(islice(iter(by_class()), 3))


def test_an_epoch_told_while_workers_draw_ahead_is_no_batch_short():
    """As Lightning does in a resumed run; the batches that were drawn are of the first epoch."""
    sampler = by_class()
    whole = [batch for _ in range(3) for batch in sampler]
    n, sampler = len(sampler), by_class()
    batches = iter(sampler)
    drawn = list(islice(batches, 2))
    sampler.set_epoch(1)
    assert [*drawn, *batches] == [*whole[:2], *whole[n : 2 * n - 2]]
    sampler.set_epoch(2)
    assert list(sampler) == whole[2 * n :]


def test_processes_share_a_batch(monkeypatch):
    whole = list(by_class())
    parts = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "count", lambda: 2)
        monkeypatch.setattr(distributed, "process_index", lambda rank=rank: rank)
        parts.append(list(by_class()))
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    monkeypatch.setattr(distributed, "count", lambda: 5)
    with pytest.raises(ValueError, match=r"batch: expected a multiple of the 5 processes, received 24"):
        next(iter(by_class()))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"^size: expected a multiple of per_class = 4, received 10"):
        by_class(size=10)
    with pytest.raises(ValueError, match=r"^size: expected at most 4 images of each of the 40 classes"):
        by_class(size=400)
    with pytest.raises(ValueError, match=r"^size: expected a multiple of 2 \* per_class = 8, received 12"):
        by_super(size=12)
    with pytest.raises(ValueError, match=r"^super_labels: expected at least two"):
        SuperLabelSampler(LABELS, LABELS * 0, size=16, per_class=4, batches_per_pair=1)


def test_labels_as_a_list():
    """As torchvision's data sets have them."""
    ours = ClassSampler(LABELS.tolist(), size=16, per_class=4, seed=3)
    assert torch.equal(ours.at(5), ClassSampler(LABELS, size=16, per_class=4, seed=3).at(5))
    with pytest.raises(ValueError, match=r"labels: expected \[N\] integers"):
        ClassSampler(LABELS / 2, size=16, per_class=4)
    with pytest.raises(ValueError, match=r"labels: expected \[N\] integers, received \['a', 'b'\]"):
        ClassSampler(["a", "b"], size=2, per_class=1)
    with pytest.raises(ValueError, match=f"super_labels: expected one for each of the {len(LABELS)} labels"):
        SuperLabelSampler(LABELS, LABELS[:-1], size=16, per_class=4, batches_per_pair=1)


def test_what_trainers_read():
    sampler = by_class()
    assert isinstance(sampler, torch.utils.data.BatchSampler)
    assert (sampler.batch_size, sampler.drop_last, len(sampler)) == (24, True, 6)
    sampler.load_state_dict({"step": 8})
    sampler.set_epoch(1)
    assert sampler.step == 8  # in the middle of that epoch already
    sampler.sampler.set_epoch(3)
    assert sampler.step == 18


def test_the_part_by_a_distributed_sampler():
    """As beside tensor parallelism, where not every process has data of its own."""
    rows = range(len(LABELS))
    parts = [next(iter(by_class(sampler=DistributedSampler(rows, 3, rank)))) for rank in range(3)]
    assert [row for part in parts for row in part] == by_class().at(0).tolist()
    with pytest.raises(ValueError, match=r"^size: expected a multiple of the 7 processes, received 24"):
        next(iter(by_class(sampler=DistributedSampler(rows, 7, 0))))
    with pytest.raises(ValueError, match=r"^sampler: expected a torch.utils.data.DistributedSampler or None"):
        by_class(sampler=torch.utils.data.SequentialSampler(rows))
    with pytest.raises(TypeError, match="use_distributed_sampler=False"):  # as Lightning attempts it
        ClassSampler(DistributedSampler(rows, 2, 0), batch_size=24, drop_last=True)
