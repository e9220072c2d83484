"""Losses inside the trainers of sentence-transformers: batches of classes, a run resumed to the bit."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import rankgrad

st = pytest.importorskip("sentence_transformers", reason="pip install 'rankgrad[sentence-transformers]'")
datasets = pytest.importorskip("datasets", reason="pip install 'rankgrad[sentence-transformers]'")

from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments

from rankgrad.integrations.sentence_transformers import (
    CachedRankingLoss,
    ClassBatches,
    CrossEncoderRankingLoss,
    LossCheckpoint,
    RankingLoss,
)

import texts

NDCG = partial(rankgrad.ndcg_loss, lam=2.0)


def labelled(many=48):
    return datasets.Dataset.from_dict({"text": texts.sentences(many), "label": [i % 6 for i in range(many)]})


def arguments(folder, kind=st.SentenceTransformerTrainingArguments, **kwargs):
    kwargs = {"per_device_train_batch_size": 12, "max_steps": 6, "save_steps": 3, "learning_rate": 1e-2, **kwargs}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "steps", "use_cpu": True, "seed": 5}
    return kind(str(folder), **quiet, **kwargs)


def trained(folder, loss, make_model, resume=None, **kwargs):
    model = make_model()
    loss = loss(model)
    trainer = st.SentenceTransformerTrainer(
        model,
        arguments(folder, **kwargs),
        train_dataset=labelled(),
        eval_dataset=labelled(24),
        loss=loss,
        callbacks=[LossCheckpoint(loss)],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, loss


LOSSES = {
    "memory": lambda model: RankingLoss(model, rankgrad.RecallLoss(lam=1.0, memory=2)),
    "cached proxies": lambda model: CachedRankingLoss(model, rankgrad.ProxyRankingLoss(6, 16), mini_batch_size=4),
}


@pytest.mark.parametrize("name", LOSSES)
def test_resumed_to_the_bit(folder, tmp_path, name):
    torch.manual_seed(1)
    loss = LOSSES[name]
    proxies = rankgrad.ProxyRankingLoss(6, 16)

    def make(model):
        made = loss(model)
        if isinstance(made.loss, rankgrad.ProxyRankingLoss):
            made.loss.load_state_dict(proxies.state_dict())
        return made

    settings = {"batch_sampler": ClassBatches(per_class=3), "gradient_accumulation_steps": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 12}
    model = partial(texts.bi_encoder, folder.with_name("dropout"), 0.2)
    whole, kept = trained(tmp_path / "whole", make, model, **settings)
    state = dict(torch.load(tmp_path / "whole/checkpoint-3/loss_state_0.pt")["loss"])
    assert state and not any(key.startswith("model") for key in state)
    torch.rand(7)  # the generator stands elsewhere when training goes on
    again, loss_again = trained(
        tmp_path / "whole", make, model, resume=str(tmp_path / "whole/checkpoint-3"), **settings
    )
    for one, two in ((whole, again), (kept.loss, loss_again.loss)):
        for key, value in one.state_dict().items():
            assert torch.equal(value, two.state_dict()[key]), key
    moved = texts.bi_encoder(folder.with_name("dropout"), 0.2)
    assert not torch.equal(next(moved.parameters()), next(whole.parameters()))


def test_a_checkpoint_without_the_state_is_refused(folder, tmp_path, model):
    loss = LOSSES["memory"](model)
    state = SimpleNamespace(global_step=3)
    args = SimpleNamespace(output_dir=str(tmp_path), process_index=0)
    with pytest.raises(FileNotFoundError, match=r"checkpoint-3/loss_state_0.pt: no state of the loss"):
        LossCheckpoint(loss).on_train_begin(args, state, None)
    (tmp_path / "checkpoint-3").mkdir()
    LossCheckpoint({"other": loss}).on_save(args, state, None)
    with pytest.raises(ValueError, match=r"loss: expected the losses of .*'other'.*, received .*'loss'"):
        LossCheckpoint(loss).on_train_begin(args, state, None)
    LossCheckpoint(loss).on_save(args, state, None)
    other = RankingLoss(model, rankgrad.ProxyRankingLoss(6, 16))
    with pytest.raises(ValueError, match=r"loss loss: expected the state in .*loss.item_loss"):
        LossCheckpoint(other).on_train_begin(args, state, None)


def test_class_batches():
    data = datasets.Dataset.from_dict({"text": texts.sentences(24), "intent": [f"i{i % 6}" for i in range(24)]})
    sampler = ClassBatches(per_class=2, column="intent")(data, batch_size=9, seed=1)
    for batch in sampler:
        named = [data["intent"][row] for row in batch]
        assert len(batch) == 8 and all(named.count(one) == 2 for one in named)
    with pytest.warns(UserWarning, match="6 labels x 2 texts: batches of 12"):
        assert ClassBatches(2, column="intent")(data, batch_size=64).batch_size == 12
    with pytest.raises(
        ValueError,
        match=r"^column: expected one of the columns \['text', 'intent'\], as in ClassBatches\(2, column=",
    ):
        ClassBatches(2)(data, batch_size=8, valid_label_columns=["label", "score"])
    with pytest.raises(ValueError, match=r"^batch_size: expected at least per_class = 4, received 3"):
        ClassBatches(4, column="intent")(data, batch_size=3)
    with pytest.raises(ValueError, match=r"^text: expected labels of which some texts have the same"):
        ClassBatches(2, column="text")(data, batch_size=8)
    alike = datasets.Dataset.from_dict({"text": texts.sentences(4), "label": ["a"] * 4})
    with pytest.raises(ValueError, match=r"^label: expected two different labels at least, received 'a'"):
        ClassBatches(2, column="label")(alike, batch_size=4)
    named = data.rename_column("intent", "label")
    with pytest.raises(ValueError, match=r"^label: expected integers \(dataset.class_encode_column\('label'\)"):
        ClassBatches(2)(named, batch_size=8, valid_label_columns=["label"])
    assert len(ClassBatches(2)(named.class_encode_column("label"), batch_size=8, valid_label_columns=["label"]))


def test_a_cross_encoder_learns_in_its_trainer(reranker, tmp_path):
    lists = [texts.sentences(6, seed=100 + i) for i in range(24)]
    grades = [[float("w1" in text.split()) + float("w2" in text.split()) for text in one] for one in lists]
    data = datasets.Dataset.from_dict({"query": texts.sentences(24, seed=9), "docs": lists, "labels": grades})
    trainer = CrossEncoderTrainer(
        reranker,
        arguments(tmp_path, CrossEncoderTrainingArguments, max_steps=12, learning_rate=5e-3, save_steps=99),
        train_dataset=data,
        loss=CrossEncoderRankingLoss(reranker, NDCG, mini_batch_size=0),
    )
    before = copy.deepcopy(reranker.state_dict())
    trainer.train()
    assert any(not torch.equal(value, before[key]) for key, value in reranker.state_dict().items())
    assert all(torch.isfinite(value).all() for value in reranker.state_dict().values())
