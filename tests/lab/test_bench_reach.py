"""``rankgrad bench reach`` on small inputs: every row is measured, and a gradient that differs is no time."""

import types

import pytest
import torch

from rankgrad.engine import dispatch
from rankgrad.lab.bench import reach
from rankgrad.lab.cli import main


def cli(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    return caught.value.code


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(reach, "LENGTHS", (9000,))
    monkeypatch.setattr(reach, "BATCHES", (16,))
    monkeypatch.setattr(reach, "EMBEDDINGS", ((16, 0, "highest"), (8, 32, "high")))


def test_the_table(tmp_path, capsys):
    file = tmp_path / "reach.md"
    assert cli("bench", "reach", "--markdown", str(file)) == 0
    text = file.read_text()
    for row in ("| one list of 9,000 | 50 % | window |", "| 16 lists of 16 | 4 | automatic |", "recall, lam"):
        assert row in text
    assert "differs" not in text


def test_embeddings():
    precision = torch.get_float32_matmul_precision()
    cells = reach._embeddings(torch.device("cpu"))
    assert [row[0] for row in cells[1:]] == ["16", "16", "8 against 32", "8 against 32"]
    assert all(row[-1].endswith("MiB") for row in cells[1:])
    assert torch.get_float32_matmul_precision() == precision


def test_a_wrong_gradient_is_no_time(monkeypatch, capsys):
    def off_by_one(request):
        answer = dispatch.reference.evaluate(request)
        return answer._replace(gradient=answer.gradient + 1)

    monkeypatch.setattr(reach, "reference", types.SimpleNamespace(evaluate=off_by_one))
    assert cli("bench", "reach") == 1
    assert "differs" in capsys.readouterr().out
