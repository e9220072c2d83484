"""A trained network for other programs: ONNX or torch.export, checked against the network itself."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankgrad.lab.training.checkpoint import write_bytes
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Exportable

#: The largest difference to the network's own output, of embeddings of unit length and of scores of size one.
TOLERANCE = 1e-4

#: Kind -> ending of its files.
ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}


def export(wanted: Exportable, kind: str, out: Path) -> float:
    """Write the network, read it again, and compare; the file appears only if the outputs agree.

    Args:
        wanted: What to export.
        kind: A key of :data:`ENDINGS`.
        out: The file.

    Returns:
        The largest difference between the outputs of the file and of the network, for batches of one, two and five
        rows.
    """
    with tempfile.TemporaryDirectory() as place:
        written = Path(place) / f"network{ENDINGS[kind]}"
        try:
            run = {"onnx": _onnx, "torch-export": _torch_export}[kind](wanted, written)
        except (ImportError, OSError, MemoryError):
            raise
        except Exception as error:  # whatever torch raises of a network that it cannot trace
            said = str(error).strip().partition("\n")[0]
            raise UserError(f"--to: torch cannot write this network as {kind} ({said})") from None
        difference = _difference(wanted, run)
        if not difference <= TOLERANCE:
            raise UserError(
                f"--to: the {kind} file gives other outputs than the network (difference {difference:.2g}, "
                f"at most {TOLERANCE:g} is accepted); nothing was written"
            )
        write_bytes(out, written.read_bytes())
    return difference


def _difference(wanted: Exportable, run: Callable[..., Tensor]) -> float:
    """Relative to the size of the outputs, where they are larger than one."""
    largest = 0.0
    for rows in (1, 2, 5):
        given = wanted.draw(rows)
        with torch.inference_mode():
            own = wanted.module(*given).float().cpu()
        found = run(*given)
        if found.shape != own.shape:
            return torch.inf
        difference = (found - own).abs().max() / max(1.0, float(own.abs().max()))
        if not bool(difference <= largest):  # NaN too
            largest = float(difference)
    return largest


def _dimensions(wanted: Exportable) -> tuple[dict[int, Any], ...]:
    """Which dimensions of each input may vary."""
    varying: dict[int, Any] = {0: torch.export.Dim("rows", min=1)}
    if wanted.lengths is not None:
        varying[1] = torch.export.Dim("tokens", min=wanted.lengths[0], max=wanted.lengths[1])
    return tuple(varying for _ in wanted.inputs)


def _torch_export(wanted: Exportable, path: Path) -> Callable[..., Tensor]:
    program = torch.export.export(wanted.module, wanted.draw(2), dynamic_shapes=_dimensions(wanted))
    torch.export.save(program, path, extra_files={"rankgrad.json": json.dumps(_described(wanted))})
    module = torch.export.load(path).module()
    return lambda *given: module(*given).detach().float().cpu()


def _onnx(wanted: Exportable, path: Path) -> Callable[..., Tensor]:
    import onnxruntime
    import onnxscript  # noqa: F401  # torch.onnx needs it: an error before the network is traced

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "# The axis name")  # two inputs share their dimensions
        program = torch.onnx.export(
            wanted.module,
            wanted.draw(2),
            dynamo=True,
            verbose=False,
            input_names=list(wanted.inputs),
            output_names=[wanted.output[0]],
            dynamic_shapes=_dimensions(wanted),
        )
    assert program is not None
    program.model.metadata_props.update({"rankgrad": json.dumps(_described(wanted))})
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(*given: Tensor) -> Tensor:
        named = zip(wanted.inputs, given, strict=True)
        return torch.from_numpy(session.run(None, {name: value.cpu().numpy() for name, value in named})[0])

    return run


def _described(wanted: Exportable) -> dict[str, str]:
    return dict([*wanted.inputs.items(), wanted.output])
