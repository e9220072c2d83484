"""The network: a sentence-transformers model, from a folder or by its name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.text.config import Model
from rankgrad.lab.training.checkpoint import write_folder
from rankgrad.lab.training.errors import UserError


class TextEmbedder(nn.Module):
    """Texts -> embeddings ``[B, dim]``, not normalised (losses and evaluation do that)."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.embedding_size = int(backbone.get_embedding_dimension())

    def forward(self, texts: list[str]) -> Tensor:
        """Embeddings of a batch of texts, float32 under autocast too."""
        inputs = self.backbone.preprocess(texts)
        device = next(self.backbone.parameters()).device
        inputs = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        found: Tensor = self.backbone(inputs)["sentence_embedding"]
        return found.float()


#: What a model needs besides its weights: settings and vocabularies.
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.spm"]


def _fetched(name: str) -> Path:
    """The folder of a model of the Hugging Face hub, in its cache."""
    from huggingface_hub import snapshot_download

    repository = name if "/" in name else f"sentence-transformers/{name}"
    try:
        folder = Path(snapshot_download(repository, allow_patterns=[*_SMALL_FILES, "*.safetensors"]))
        if not any(folder.rglob("*.safetensors")):
            snapshot_download(repository, allow_patterns=["*pytorch_model*.bin"])
    except (OSError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model: {name!r} is neither the folder of a sentence-transformers model nor the name of one that the "
            f"Hugging Face hub has ({said})"
        ) from None
    return folder


def check(config: Model) -> Path:
    """The folder of the model, and whether there is one in it, before anything is read."""
    import sentence_transformers  # noqa: F401  (missing: the command says which extra has it)

    if config.name is None:
        raise UserError(
            "model: the task text needs a sentence-transformers model, a folder or a name: model=DIR, or "
            "model=all-MiniLM-L6-v2"
        )
    folder = Path(config.name).expanduser()
    if not folder.is_dir():
        folder = _fetched(config.name)
    if not any((folder / name).is_file() for name in ("modules.json", "config.json")):
        raise UserError(f"model: {config.name} has neither modules.json nor config.json")
    if not [path for kind in ("*.safetensors", "pytorch_model*.bin") for path in folder.rglob(kind)]:
        raise UserError(f"model: {config.name} has no weights (expected model.safetensors)")
    if not [path for kind in ("*token*", "vocab*", "*.spm", "*.model") for path in folder.rglob(kind)]:
        # transformers would make one that knows no word
        raise UserError(f"model: {config.name} has no tokenizer (expected tokenizer.json)")
    return folder


def build(config: Model, seed: int) -> TextEmbedder:
    """The model, on the CPU."""
    folder = check(config)
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()  # "Loading weights" of files that are here
    torch.manual_seed(seed)
    try:
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    except Exception as error:  # whatever the readers of its files raise
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"model: {config.name} is not a sentence-transformers model that loads ({said})") from None
    if config.max_length is not None:
        model.max_seq_length = config.max_length
    return TextEmbedder(model)


def save(network: TextEmbedder, folder: Path) -> None:
    """The model as a folder for sentence-transformers, whole or not at all."""
    size = sum(parameter.nbytes for parameter in network.parameters())
    write_folder(folder, lambda beside: network.backbone.save(str(beside), create_model_card=False), size)
