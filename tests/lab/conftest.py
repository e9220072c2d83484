"""Shared by the tests of the command: small data sets, finished runs, and one thread where the last bit counts."""

import shutil

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For all runs of the module alike: how sums are split over threads decides their last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A small data set in VOC's layout, not to be changed."""
    import scenes

    return scenes.voc_set(tmp_path_factory.mktemp("voc"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short run, not to be changed."""
    from rankgrad.lab.recipes import run

    settings = ["epochs=1", "save_minutes=0", "evaluate_first=false", "device=cpu"]
    return run.run("digits", settings, out=str(tmp_path_factory.mktemp("runs") / "a"))[0]


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """The folder of a short run on a folder of images, and that folder; not to be changed."""
    from rankgrad.lab.recipes import run

    import images

    root = images.folder_set(tmp_path_factory.mktemp("data"))
    settings = ["backbone=tiny", "weights=none", "precision=fp32", "embedding=8", "batch.size=6", "per_class=2"]
    settings += ["view.resize=16", "view.crop=12", "lr=1e-3", "epochs=1", "device=cpu", f"data.root={root}"]
    return run.run("folder", settings, out=str(tmp_path_factory.mktemp("runs") / "mine"))[0], root


@pytest.fixture(scope="module")
def detector(root, tmp_path_factory):
    """The folder of a short run on small scenes, and their images; not to be changed."""
    from rankgrad.lab.recipes import run

    import scenes

    settings = [*scenes.SMALL, "data.counts=any", f"data.root={root}"]
    return run.run("voc", settings, out=str(tmp_path_factory.mktemp("runs") / "detector"))[0], root / "JPEGImages"
