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
#: The tests' own small texts and model.
TEXTS = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import text_files; from pathlib import Path;"
    "text_files.labelled(Path('texts.csv')); text_files.tiny_model(Path('.'))"
)
TRAIN_TEXTS = "train text --data texts.csv model=model epochs=1 batch.size=16 device=cpu --out run"
QUERIES = (
    "import random; rows = [f'{i % 3} qid:{q} 1:{random.random()} 2:{i}' for q in range(40) for i in range(6)];"
    "open('queries.txt', 'w').write('\\n'.join(rows))"
)
TABLE = (
    "from pathlib import Path; rows = [f'{q},{i % 3},{i}' for q in range(40) for i in range(6)];"
    "Path('queries.csv').write_text('\\n'.join(['query,label,f', *rows]))"
)
RANKED = "import json; assert json.load(open('run/baselines/lightgbm/result.json'))['best']['NDCG@10'] > 0"
IN_ITS_TRAINER = """import sentence_transformers as st, datasets
from rankgrad.integrations.sentence_transformers import ClassBatches, RankingLoss
data = datasets.load_dataset("csv", data_files="texts.csv")["train"].class_encode_column("label")
model = st.SentenceTransformer("model", device="cpu")
given = st.SentenceTransformerTrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=8, batch_sampler=ClassBatches(2), report_to="none"
)
st.SentenceTransformerTrainer(model, given, train_dataset=data, loss=RankingLoss(model)).train()
"""
METRIC = (
    "import torch; from rankgrad.integrations.torchmetrics import NDCG; metric = NDCG(5);"
    "metric.update(torch.rand(4), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 1, 1]));"
    "assert metric.compute() > 0"
)
ADAPTER = (
    "import torch; from pytorch_metric_learning.miners import MultiSimilarityMiner as Miner;"
    "from rankgrad.integrations.pytorch_metric_learning import RankingLoss;"
    f"batch = {BATCH}; RankingLoss()(*batch, Miner()(*batch)).backward()"
)
REGIONS = (
    "import torch, torchvision; from rankgrad.detection import RegionLoss;"
    "RegionLoss(memory=0)(torch.randn(64, 6, requires_grad=True), torch.randint(0, 6, (64,))).backward()"
)
#: What each extra must run: Python code, a program of this repository, or the words behind ``rankgrad``.
EXTRAS = {
    "": [LOSS.replace("RecallLoss()", "AveragePrecisionLoss(memory=1)")],
    "fast": [LOSS],
    "cli": ["--help", "sodeep --help"],
    "sodeep": ["sodeep train --length 4 --steps 2 --hidden 4 --out sorter.safetensors"],
    "bench": ["bench --device cpu --longest 100000 --largest-batch 128"],
    "train": [DIGITS, "eval run", "report run"],
    "figures": ["figure gradients --out figures"],
    "detection": [REGIONS],
    "text": [TEXTS, TRAIN_TEXTS, "eval run", "embed run texts.csv", "export run --to torch-export"],
    "ranker": [
        QUERIES,
        "train ranker --data queries.txt epochs=1 device=cpu --out run",
        RANKED,
        TABLE,
        "train ranker --data queries.csv epochs=1 device=cpu baselines=[] --out other",
    ],
    "export": [DIGITS, "export run --to onnx", "export run --to torch-export"],
    "search": [DIGITS, IMAGES, "embed run images --index images.faiss", "search images.faiss images/1.png"],
    "wandb": [f"{DIGITS} callbacks=[wandb]", "import glob; assert glob.glob('run/wandb/offline-run-*/*.wandb')"],
    "mlflow": [f"{DIGITS} callbacks=[mlflow]", "import os; assert os.path.getsize('run/mlflow-id.txt')"],
    "sentence-transformers": [TEXTS, IN_ITS_TRAINER],
    "torchmetrics": [METRIC],
    "pytorch-metric-learning": [ADAPTER],
    "integrations": [TEXTS, IN_ITS_TRAINER, METRIC, ADAPTER, "import lightning"],
    "docs": ["docs/machinery/build.py site"],
}
#: Trackers that keep to this machine.
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
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
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, env=clean | OFFLINE)


def run(*words, cwd):
    done = started(*words, cwd=cwd)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def site_of(environment):
    return next(environment.glob("lib/python*/site-packages"))


@pytest.fixture
def environment(base, tmp_path):
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    (site_of(folder) / "base.pth").write_text(f"{base}\n")
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
        elif what.startswith("docs/"):
            told += run(environment / "bin/python", *f"{ROOT}/{what}".split(), cwd=tmp_path)
        else:
            told += run(environment / "bin/rankgrad", *what.split(), cwd=tmp_path)
    installed = run(environment / "bin/python", "-m", "pip", "list", cwd=tmp_path)
    assert EXPECTED not in told or "numba" not in installed
    assert "is not installed" not in told.replace(EXPECTED, "")
    assert re.search(r"^torch +\d", installed, re.MULTILINE)
    assert not (site_of(environment) / "torch").exists()  # that of the links was taken


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_an_extra_the_command_says_what_to_install(environment, tmp_path):
    install(environment, "")
    done = started(environment / "bin/rankgrad", "ls", cwd=tmp_path)
    assert done.returncode == 1 and "is not installed: pip install" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
