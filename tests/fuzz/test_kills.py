"""A run that is killed again and again at random moments ends with the same bits as one that is left alone.

``RANKGRAD_FUZZ_KILLS`` says how often it is killed (once in ``make test``, ten times in ``make test-all``),
``RANKGRAD_FUZZ_SEED`` at which moments.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from rankgrad.lab.recipes import run
from rankgrad.lab.training import checkpoint

from runs import rows

KILLS = int(os.environ.get("RANKGRAD_FUZZ_KILLS", "1"))
SEED = int(os.environ.get("RANKGRAD_FUZZ_SEED", "0"))


def _lines(path):
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.parametrize("kills", [KILLS, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200 + 60 * KILLS)
def test_killed_at_random_moments(tmp_path, kills):
    """SIGKILL, and now and then SIGTERM: while a step is computed, a checkpoint is written, an epoch evaluated."""
    draw = random.Random(SEED)
    settings = [f"epochs={2 + kills}", "evaluate_first=true", "save_minutes=0", "device=cpu"]
    threads = str(torch.get_num_threads())  # they decide the last bit of sums
    whole, _ = run.run("digits", settings, out=str(tmp_path / "whole"))
    cut = tmp_path / "cut"
    command = [sys.executable, "-m", "rankgrad", "train", "digits", *settings]
    command += ["--out", str(cut), "--resume"]
    quiet = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "env": os.environ | {"OMP_NUM_THREADS": threads},
    }
    killed, statuses = 0, []
    while killed < kills:
        process = subprocess.Popen(command, **quiet)
        wanted = _lines(cut / "steps.csv") + draw.randint(1, 4)
        while process.poll() is None and _lines(cut / "steps.csv") < wanted:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        sent = signal.SIGTERM if draw.random() < 0.2 else signal.SIGKILL
        process.send_signal(sent)
        statuses.append((sent, process.wait()))
        assert statuses[-1][1] in (-sent, 128 + sent), statuses  # 0: the run was faster and was not killed
        killed += 1
    run.run("digits", settings, out=str(cut), resume=True)
    assert rows(cut) == rows(whole) and rows(cut, "evaluations") == rows(whole, "evaluations")
    for name in ("last.safetensors", "best.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    results = [json.loads((folder / "result.json").read_text()) for folder in (cut, whole)]
    assert results[0]["best"] == results[1]["best"] and results[0]["last"] == results[1]["last"]
    assert not list(cut.glob(".*.part"))
    for name in ("state.pt", "state.previous.pt"):
        checkpoint.load_state(cut / name)
