"""Every extra alone, in a clean environment, runs what it is for; the command says which package is missing.

An environment has torch, numpy and what they need by links to those of this one, as a plain install would, and all
else by pip. Slow: ``make test-all``.
"""

import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib is of Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).parent.parent
BATCH = "torch.randn(8, 4, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])"
LOSS = f"import torch, rankgrad; rankgrad.RecallLoss()(*({BATCH})).backward()"
DIGITS = "train digits epochs=1 device=cpu --out run"
IMAGES = "from PIL import Image; import os; os.mkdir('images');" + (
    "[Image.new('L', (8, 8), 60 * i).save(f'images/{i}.png') for i in range(3)]"
)
#: What each extra must run: Python code, or the words behind ``rankgrad``.
EXTRAS = {
    "": [LOSS.replace("RecallLoss()", "AveragePrecisionLoss(memory=1)")],
    "fast": [LOSS],
    "cli": ["--help", "sodeep --help"],
    "sodeep": ["sodeep train --length 4 --steps 2 --hidden 4 --out sorter.safetensors"],
    "bench": ["bench --device cpu --longest 100000 --largest-batch 128"],
    "train": [DIGITS, "eval run/best.safetensors", "report run"],
    "figures": ["figure gradients --out figures"],
    "detection": ["import rankgrad.detection as d; d.RegionLoss(); import torchvision"],
    "text": ["ls"],
    "ranker": ["import lightgbm, pyarrow", "ls"],
    "export": [DIGITS, "export run --to onnx", "export run --to torch-export"],
    "search": [DIGITS, IMAGES, "embed run images --index images.faiss", "search images.faiss images/1.png"],
    "wandb": ["import rankgrad.lab.callbacks as c; c.build(['wandb'])"],
    "mlflow": ["import rankgrad.lab.callbacks as c; c.build(['mlflow'])"],
    "sentence-transformers": ["from rankgrad.integrations.sentence_transformers import RankingLoss"],
    "torchmetrics": ["from rankgrad.integrations.torchmetrics import NDCG; NDCG(5)"],
    "pytorch-metric-learning": [
        "import torch; from rankgrad.integrations.pytorch_metric_learning import RankingLoss as Loss;"
        f"Loss()({BATCH}).backward()"
    ],
    "integrations": ["import lightning, torchmetrics, sentence_transformers, pytorch_metric_learning"],
    "docs": ["import zensical, latex2mathml"],
}
#: Extras that others are made of, or that the whole test suite tries.
COVERED = {"dev"}
#: Runs without Numba say so, once.
EXPECTED = "Numba is not installed; using the slower sorts of torch (pip install numba)"


def test_every_extra_is_tried():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*declared} - COVERED == {*EXTRAS} - {""}


def closure(names):
    """Distributions of this environment: these and all they need."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform or an extra
            continue
        needs = [need for need in found[name].requires or () if "extra ==" not in need]
        waiting += [re.match(r"[\w.-]+", need)[0] for need in needs]
    return found.values()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of links to torch, numpy and what they need."""
    folder = tmp_path_factory.mktemp("base")
    for distribution in closure(["torch", "numpy"]):
        for file in distribution.files or ():
            top = Path(file).parts[0]
            target = Path(distribution.locate_file(top))
            if top not in ("..", "__pycache__") and target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)
    return folder


def started(*words, cwd):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, env=clean)


def run(*words, cwd):
    done = started(*words, cwd=cwd)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture
def environment(base, tmp_path):
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "base.pth").write_text(f"{base}\n")
    return folder


def install(folder, extra):
    package = f"{ROOT}[{extra}]" if extra else str(ROOT)
    run(folder / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", package, cwd=folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone(environment, tmp_path, extra):
    install(environment, extra)
    told = ""
    for what in EXTRAS[extra]:
        if what.startswith(("import ", "from ")):
            told += run(environment / "bin/python", "-c", what, cwd=tmp_path)
        else:
            told += run(environment / "bin/rankgrad", *what.split(), cwd=tmp_path)
    installed = run(environment / "bin/python", "-m", "pip", "list", cwd=tmp_path)
    assert EXPECTED not in told or "numba" not in installed
    assert "is not installed" not in told.replace(EXPECTED, "")
    assert "torch" in installed and not (environment / "lib/python3/site-packages/torch").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_an_extra_the_command_says_what_to_install(environment, tmp_path):
    install(environment, "")
    done = started(environment / "bin/rankgrad", "ls", cwd=tmp_path)
    assert done.returncode == 1 and "is not installed: pip install" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
