"""SoDeep's networks: training, files, and how lists reach them."""

import json
import os

import numpy as np
import pytest
import torch

import rankgrad
from rankgrad.lab import sodeep as lab
from rankgrad.lab.sodeep import training
from rankgrad.lab.training.errors import UserError
from rankgrad.surrogates import sodeep

from runs import cli

QUICK = {"hidden": 16, "steps": 300, "batch_size": 64}


@pytest.fixture(scope="module", params=["lstm", "cnn"])
def trained(request):
    errors = []
    kwargs = QUICK | ({"learning_rate": 5e-3} if request.param == "cnn" else {"learning_rate": 3e-2})
    sorter = lab.train(6, architecture=request.param, progress=lambda *report: errors.append(report), **kwargs)
    return sorter, errors


def test_training_learns_to_rank(trained):
    sorter, errors = trained
    assert [step for step, _ in errors] == [100, 200, 300]
    assert errors[-1][1] < errors[0][1]
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(500, 6, generator=generator) * 2 - 1
    ranks = sodeep.sodeep_rank(scores, sorter=sorter)
    error = (ranks - rankgrad.rank(scores, lam=1.0)).abs().mean()
    assert error < 0.75  # the best constant, 3.5 for all, is wrong by 1.5
    assert rankgrad.metrics.spearman(-ranks, scores) > 0.85


def test_a_trained_sorter_is_frozen_and_has_a_gradient_for_scores(trained):
    sorter, _ = trained
    assert not any(weight.requires_grad for weight in sorter.parameters())
    scores = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: sodeep.sodeep_rank(s, sorter=sorter.double()), scores)
    sorter.float()
    # raising a score improves its rank, nearly always
    slopes = torch.stack(
        [
            torch.autograd.grad(sodeep.sodeep_rank(scores, sorter=sorter)[:, k].sum(), scores)[0][:, k]
            for k in range(6)
        ]
    )
    assert (slopes < 0).double().mean() > 0.9


def test_a_list_reaches_the_network_in_order_and_filled_from_below():
    """By hand: existing items to the front, the rest of the sorter's length one below the least."""
    sorter = sodeep.CNNSorter(5, hidden=3, layers=1)
    scores = torch.tensor([[0.4, 9.0, -0.3], [0.1, 0.2, 0.3]])
    mask = torch.tensor([[True, False, True], [True, True, True]])
    by_hand = sorter(torch.tensor([[0.4, -0.3, -1.3, -1.3, -1.3], [0.1, 0.2, 0.3, -0.9, -0.9]])) * 5
    ranks = sodeep.sodeep_rank(scores, sorter=sorter, mask=mask)
    torch.testing.assert_close(ranks[0], torch.stack([by_hand[0, 0], torch.tensor(3.0), by_hand[0, 1]]))
    torch.testing.assert_close(ranks[1], by_hand[1, :3])


def test_the_loss_is_ap_of_the_soft_ranks():
    sorter = sodeep.LSTMSorter(5, hidden=3)
    scores, relevance = torch.tensor([0.4, 0.9, -0.3, 0.2]), torch.tensor([True, False, True, True])
    ranks = sodeep.sodeep_rank(scores, sorter=sorter)
    expected = 1 - (1 / ranks[0] + 2 / ranks[3] + 3 / ranks[2]) / 3
    torch.testing.assert_close(sodeep.sodeep_loss(scores, relevance, sorter=sorter), expected)


def test_synthetic_lists_are_of_many_kinds():
    scores = lab.synthetic_lists(2000, 12, torch.Generator().manual_seed(0))
    assert scores.shape == (2000, 12)
    assert scores.isfinite().all()
    spread = scores.max(-1).values - scores.min(-1).values
    assert (spread < 0.5).any() and (spread > 3).any()
    short = (scores[:, -1] == scores[:, -2]) & (scores[:, -1] == scores.min(-1).values)
    assert 0.1 < short.double().mean() < 0.3


def test_the_same_arguments_give_the_same_weights(monkeypatch):
    seeds = []
    real = training.synthetic_lists
    monkeypatch.setattr(training, "synthetic_lists", lambda *a: seeds.append(a[-1].initial_seed()) or real(*a))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    runs = [lab.train(4, hidden=5, steps=15, seed=seed).state_dict() for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])
    assert seeds == [0] * 30 + [1] * 15


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", [sodeep.LSTMSorter, sodeep.CNNSorter])
def test_save_and_load(tmp_path, kind):
    pytest.importorskip("safetensors")
    sorter = kind(7, hidden=5, layers=1)
    lab.save(sorter, tmp_path / "new" / "sorter.safetensors")
    loaded = lab.load(tmp_path / "new" / "sorter.safetensors")
    assert type(loaded) is kind
    assert not any(weight.requires_grad for weight in loaded.parameters())
    scores = torch.rand(3, 7)
    ranks = sodeep.sodeep_rank(scores, sorter=loaded)
    torch.testing.assert_close(ranks, sodeep.sodeep_rank(scores, sorter=sorter).detach())
    weights = sorter.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in loaded.state_dict().items())
    assert os.listdir(tmp_path / "new") == ["sorter.safetensors"]


def test_training_is_cached_by_its_recipe(tmp_path):
    pytest.importorskip("safetensors")
    path, steps = tmp_path / "sorter.safetensors", []

    def train(**kwargs):
        steps.clear()
        return lab.train(4, hidden=5, steps=100, out=path, progress=lambda *_: steps.append(1), **kwargs)

    first = train()
    assert steps
    again = train()
    assert not steps
    assert all(torch.equal(first.state_dict()[name], weight) for name, weight in again.state_dict().items())
    content = path.read_bytes()
    train(seed=3)
    assert steps
    assert path.read_bytes() != content


def test_a_file_is_complete_or_not_there(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    path = tmp_path / "sorter.safetensors"
    lab.save(sodeep.LSTMSorter(3, hidden=2), path)
    content = path.read_bytes()

    def power_cut(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(UserError, match="no space"):
        lab.save(sodeep.LSTMSorter(3, hidden=4), path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["sorter.safetensors"]


def test_files_that_are_no_sorters_are_named(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    garbage, other = tmp_path / "garbage", tmp_path / "other.safetensors"
    garbage.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"^path: expected a safetensors file, .*garbage"):
        lab.load(garbage)
    safetensors.save_file({"w": np.zeros(2)}, other)
    with pytest.raises(ValueError, match=r"^path: expected a sorter saved by rankgrad, .*other"):
        lab.load(other)
    with pytest.raises(FileNotFoundError):
        lab.load(tmp_path / "missing")


def test_the_metadata_say_what_it_is(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    lab.train(4, hidden=5, steps=3, seed=2, out=tmp_path / "s.safetensors")
    with safetensors.safe_open(tmp_path / "s.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["rankgrad.sodeep"])
    assert about["architecture"] == "lstm" and about["length"] == 4 and about["hidden"] == 5
    assert about["recipe"]["seed"] == 2 and about["recipe"]["steps"] == 3


# ------------------------------------------------------------------------------------------------ command


def test_the_command(tmp_path, capsys):
    path = tmp_path / "new" / "s.safetensors"
    options = ["--length", 5, "--out", path, "--hidden", 8, "--steps", 200, "--learning-rate", 0.03]
    assert cli("sodeep", "train", *options) == 0
    told = capsys.readouterr().out
    error, constant = (float(told.split(word)[1].split()[0].rstrip(")")) for word in ("wrong by ", "for all: "))
    assert error < 0.8 * constant
    loaded, recipe = lab.files.read(path)
    assert loaded.length == 5 and recipe["steps"] == 200 and recipe["hidden"] == 8
    content = path.read_bytes()
    assert cli("sodeep", "train", *options) == 0  # the same again: nothing to train
    assert path.read_bytes() == content


def test_the_command_leaves_other_files_alone(tmp_path, capsys):
    path = tmp_path / "thesis.tex"
    path.write_text("years of work")
    assert cli("sodeep", "train", "--length", 3, "--out", path, "--steps", 1) == 2
    assert path.read_text() == "years of work"
    assert "expected a safetensors file" in capsys.readouterr().err.replace("\n", " ").replace("│ ", "")
    assert cli("sodeep", "train", "--length", 3, "--out", tmp_path / "a", "--architecture", "mlp") == 2


def test_what_the_command_measures():
    """By hand: a sorter that gives every item the mean rank is as wrong as the constant."""
    from rankgrad.lab.sodeep.commands import mean_errors

    sorter = sodeep.CNNSorter(4, hidden=2, layers=1)
    torch.nn.init.zeros_(sorter.projection.weight)
    torch.nn.init.constant_(sorter.projection.bias, 2.5 / 4)
    error, constant = mean_errors(sorter, 4)
    assert error == pytest.approx(constant)
    assert 0.5 < constant < 1.01  # whole lists: (1.5 + 0.5 + 0.5 + 1.5) / 4 = 1; filled ones have ties
