"""A tiny BERT with random weights and a small vocabulary, made here: nothing is fetched."""

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.cross_encoder import CrossEncoder
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

WORDS = [f"w{i}" for i in range(40)]


def backbone(folder, kind, dropout, **kwargs):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(str(folder / "vocab.txt"), model_max_length=16).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 45, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 16}
    config = BertConfig(**sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **kwargs)
    kind(config).save_pretrained(folder)


def bi_encoder(folder, dropout=0.1):
    if not folder.exists():
        backbone(folder, BertModel, dropout)
    transformer = Transformer(str(folder), max_seq_length=16)
    return SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")


def cross_encoder(folder, dropout=0.0):
    if not folder.exists():
        backbone(folder, BertForSequenceClassification, dropout, num_labels=1)
    return CrossEncoder(str(folder), num_labels=1, max_length=16, device="cpu")


def sentences(many, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (many,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(40, (n,), generator=generator)) for n in lengths]
