"""The verbs on finished runs: embed, search, detect, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rankgrad.lab.training.errors import UserError, printable

#: The exit status where some images could not be read, and the others are done.
BROKEN = 3

#: Task -> what its networks are, and what uses them.
_OTHERS = {
    "detection": "a detector; use `rankgrad detect`",
    "ranker": "a ranker; `rankgrad.lab.use.load(RUN).score(features)` uses it",
}


def _files(given: list[Path]) -> list[Path]:
    """Images, and those in folders."""
    from rankgrad.lab.vision.folders import images_in

    paths = [path for one in given for path in (images_in(one, linked=True) if one.is_dir() else [one])]
    if not paths:
        raise UserError(f"IMAGES: no images in {', '.join(map(str, given))}")
    return paths


def _texts(given: list[Path], data: Any, column: str | None) -> list[str]:
    """The texts of files: a column of a table, as in training, or each line that is not empty."""
    from rankgrad.lab.text.data import SUFFIXES, texts_of
    from rankgrad.lab.training.reading import read_lines

    texts: list[str] = []
    for path in given:
        if not path.is_file():
            raise UserError(f"TEXTS: no such file {str(path)!r}")
        if path.suffix.lower() in SUFFIXES:
            name, found = texts_of(path, data, column)
            print(f"{path}: {len(found):,} texts of the column {name!r}")
        else:
            found = [line for line in read_lines(path, argument="TEXTS") if line.strip()]
        texts += found
    if not texts:
        raise UserError(f"TEXTS: no texts in {', '.join(map(str, given))}")
    return texts


def _tell_broken(faults: list[str], many: int, done: str) -> None:
    """Say which images could not be read, if any, by an exit status of its own: the others are done."""
    from rankgrad.lab.vision.images import listed

    if faults:
        raise UserError(f"IMAGES: {listed(faults, many)}. The others are {done}.", status=BROKEN)


def embed(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a checkpoint in it.")],
    items: Annotated[
        list[Path],
        typer.Argument(help="Images, or folders of images; for texts .csv, .tsv, .jsonl, or a text in each line."),
    ],
    out: Annotated[Path, typer.Option(help="The .npz file to write.")] = Path("embeddings.npz"),
    index: Annotated[Path | None, typer.Option(help="Also write a FAISS index for `rankgrad search`.")] = None,
    column: Annotated[
        str | None, typer.Option(help="The column of a table of texts; default: as in training.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Embed images or texts: writes an .npz with `embeddings` [N, dim] of unit length and `names` [N]."""
    import io

    import numpy as np

    from rankgrad.lab.recipes import checkpoint_of
    from rankgrad.lab.training import log
    from rankgrad.lab.training.checkpoint import write_bytes
    from rankgrad.lab.training.trained import TrainedEmbedder
    from rankgrad.lab.use import index as indices
    from rankgrad.lab.use import load

    if index is not None:
        import faiss  # noqa: F401  (if it is missing, the command says so before it embeds)
    network = load(run, device=device)
    if not isinstance(network, TrainedEmbedder):
        raise UserError(f"RUN: expected a run that embeds, received {_OTHERS[network.config.task]}")
    if network.kind == "text":
        names = _texts(items, network.config.data, column)
    else:
        names = [str(path) for path in _files(items)]
    with log.progress("embedding", len(names), 0, show=True) as bar:
        found, rows, faults = network.embed_readable(names, progress=bar.advance)
    given, names, embeddings = len(names), [names[row] for row in rows], found.numpy()
    file = io.BytesIO()
    np.savez(file, embeddings=embeddings, names=np.array(names))
    write_bytes(out, file.getvalue())
    print(printable(f"{len(names)} embeddings of length {embeddings.shape[1]} in {out}"))
    if index is not None:
        indices.write(index, embeddings, names, checkpoint_of(run), network.kind)
        print(printable(f"index: {index}"))
    _tell_broken(faults, given, "embedded")


def search(
    index: Annotated[Path, typer.Argument(help="An index that `rankgrad embed --index` wrote.")],
    query: Annotated[list[str], typer.Argument(help="Images, or texts for an index of texts.")],
    nearest: Annotated[int, typer.Option(min=1, help="How many items to show.")] = 8,
    page: Annotated[Path, typer.Option(help="The HTML page.")] = Path("search.html"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Search an index: prints the nearest items of each query, and shows them on an HTML page."""
    from rankgrad.lab.training.checkpoint import write_text
    from rankgrad.lab.use import index as indices
    from rankgrad.lab.use import load
    from rankgrad.lab.use import page as pages

    opened = indices.read(index)
    embeddings, rows, faults = load(opened.checkpoint, device=device).embed_readable(query)
    given, query = len(query), [query[row] for row in rows]
    found = opened.nearest(embeddings.numpy(), nearest)
    for one, items in zip(query, found, strict=True):
        print(printable(one))
        for place, (name, score) in enumerate(items, 1):
            print(f"{place:4d}  {score:.3f}  {printable(name)}")
    write_text(page, pages.write(page, query, found, opened.kind))
    print(printable(f"page: {page}"))
    _tell_broken(faults, given, "searched for")


def detect(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a checkpoint in it.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    out: Annotated[Path, typer.Option(help="The folder of the drawn images.")] = Path("detections"),
    score: Annotated[
        float | None, typer.Option(help="The lowest score to draw; default: best F1 on the run's test images.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Detect objects: writes the images with boxes drawn, and detections.json with all boxes."""
    from rankgrad.lab.detection.trained import TrainedDetector
    from rankgrad.lab.training import log
    from rankgrad.lab.training.checkpoint import write_text
    from rankgrad.lab.use import drawing, load

    network = load(run, device=device)
    if not isinstance(network, TrainedDetector):
        raise UserError(f"RUN: expected a detector, received a network of the task {network.config.task!r}")
    given = _files(images)
    with log.progress("detecting", len(given), 0, show=True) as bar:
        found, kept, faults = network.detect_readable(given, progress=bar.advance)
    paths = [given[row] for row in kept]
    least = _threshold(run if run.is_dir() else run.parent) if score is None else score
    by_file, drawn = {}, 0
    for path, name, one in zip(paths, drawing.names(paths), found, strict=True):
        rows = list(zip(one["boxes"].tolist(), one["scores"].tolist(), one["labels"].tolist(), strict=True))
        boxes = [{"class": network.classes[c - 1], "score": s, "box": b} for b, s, c in rows]
        by_file[str(path)] = boxes
        shown = [box for box in boxes if box["score"] >= least]
        drawn += len(shown)
        drawing.draw(path, out / name, shown, network.classes)
    write_text(out / "detections.json", json.dumps(by_file))
    total = sum(map(len, by_file.values()))
    print(printable(f"{drawn} boxes with a score of at least {least:.2g} on {len(paths)} images in {out}"))
    print(printable(f"all {total} boxes: {out / 'detections.json'}, in pixels: left, top, right, bottom"))
    _tell_broken(faults, len(given), "done")


def _threshold(folder: Path) -> float:
    """Where F1 was best on the test images of the run; 0.5 if that is not known."""
    from rankgrad.lab.detection.report import Detections
    from rankgrad.lab.training.run_files import read_json_if_there

    found = read_json_if_there(folder / "detections.json", Detections)
    return float(found["threshold"]) if found else 0.5


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a checkpoint in it.")],
    to: Annotated[str, typer.Option(help="onnx or torch-export.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="The file; default: beside the checkpoint.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
) -> None:
    """Export the network of a run as ONNX or torch.export, and check that the file gives the same outputs."""
    from rankgrad.lab.training.config import chosen
    from rankgrad.lab.use import exporting as files
    from rankgrad.lab.use import load

    kind = chosen("--to", to, files.ENDINGS)
    wanted = load(run, device=device).exportable()
    target = out or (run if run.is_dir() else run.parent) / f"network{files.ENDINGS[kind]}"
    difference = files.export(wanted, kind, target)
    given = ", ".join(f"{name} {words}" for name, words in wanted.inputs.items())
    print(printable(f"{target}: {given} -> {wanted.output[0]} {wanted.output[1]}"))
    print(f"same outputs as the network (largest difference {difference:.1g})")
    if wanted.write_beside is not None:
        print(f"with it: {wanted.write_beside(target.parent)}")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (embed, search, detect, export):
        app.command()(verb)
