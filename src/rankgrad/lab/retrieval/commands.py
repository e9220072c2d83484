"""The verb of retrieval: embed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer

from rankgrad.lab.training.errors import UserError


def embed(
    checkpoint: Annotated[Path, typer.Argument(help="best.safetensors or last.safetensors of a run.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    out: Annotated[Path, typer.Option(help="Where the embeddings go.")] = Path("embeddings.npz"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
) -> None:
    """Embed images: an .npz with `embeddings` [N, dim], of unit length, and `names` [N]."""
    import numpy as np
    import torch

    from rankgrad.lab.retrieval.images.config import Config, Data
    from rankgrad.lab.retrieval.images.data.folder import images_in
    from rankgrad.lab.retrieval.images.source import ImageSource
    from rankgrad.lab.retrieval.images.task import ImageTask
    from rankgrad.lab.retrieval.splits import Items
    from rankgrad.lab.retrieval.task import embed as embed_all
    from rankgrad.lab.training import log, machine
    from rankgrad.lab.training.checkpoint import load_weights, write_bytes
    from rankgrad.lab.training.config import validated
    from rankgrad.pairs import unit_length

    weights, notes = load_weights(checkpoint)
    if notes["config"].get("task") != "retrieval":
        raise UserError(
            f"CHECKPOINT: expected a network that embeds images, received one of the task "
            f"{notes['config'].get('task')!r}"
        )
    config: Config = ImageTask.completed(validated(Config.upgraded(notes["config"]), Config))
    paths = [path for given in images for path in (images_in(given) if given.is_dir() else [given])]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"IMAGES: no such file {', '.join(missing[:5])}")
    if not paths:
        raise UserError(f"IMAGES: no images in {', '.join(map(str, images))}")
    names = [str(path) for path in paths]
    items = Items(paths, torch.zeros(len(paths), dtype=torch.int64), None, names)
    where = machine.device_of(device)
    network = ImageTask.rebuild(config, weights, notes).to(where)
    source = ImageSource(items, Data(name="folder"), config.view, where)
    if source.store.faults:
        raise UserError(f"IMAGES: {'; '.join(source.store.faults[:5])}")
    file = io.BytesIO()
    with log.progress("embedding", len(names), 0, show=True) as bar:
        found = embed_all(network, source, config.precision, progress=bar.advance)
    embeddings = unit_length(found).cpu().numpy()
    np.savez(file, embeddings=embeddings, names=np.array(names))
    write_bytes(out, file.getvalue())
    print(f"{len(names)} embeddings of length {embeddings.shape[1]} in {out}")


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(embed)
