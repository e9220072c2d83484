"""Small text data and a tiny random BERT, made by the tests: a label has words of its own among common ones."""

import csv
import json
import random

WORDS = [f"word{i}" for i in range(60)]


def sentence(label, seed):
    draw = random.Random(f"{label}-{seed}")
    own = [WORDS[(7 * label + k) % 50] for k in range(3)]
    return " ".join(draw.sample(own, 2) + draw.choices(WORDS[50:], k=3))


def tiny_model(folder):
    """A sentence-transformers model of 2 layers and 16 numbers, its vocabulary the words above."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizer

    inner = folder / "bert"
    inner.mkdir(parents=True)
    (inner / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizer(str(inner / "vocab.txt"), model_max_length=16)
    torch.manual_seed(0)
    settings = BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(settings).save_pretrained(inner)
    tokenizer.save_pretrained(inner)
    transformer = Transformer(str(inner), max_seq_length=16)
    model = SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")
    model.save(str(folder / "model"), create_model_card=False)
    return folder / "model"


def table(path, columns, rows):
    """A .csv, .tsv or .jsonl file."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
        return path
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([columns, *rows])
    return path


def labelled(path, labels=8, each=8, columns=("text", "label")):
    rows = [(sentence(label, k), f"label {label}") for label in range(labels) for k in range(each)]
    return table(path, columns, rows)


def pairs(path, many=40):
    rows = [(sentence(k, 0) + " anchor", sentence(k, 1) + " positive") for k in range(many)]
    return table(path, ("anchor", "positive"), rows)


def graded(path, queries=20, each=4):
    rows = [(f"{sentence(q, 0)} {q}", f"{sentence((q + k) % queries, k)} {q} {k}", 3 - k)
            for q in range(queries) for k in range(each)]  # fmt: skip
    return table(path, ("query", "document", "grade"), rows)
