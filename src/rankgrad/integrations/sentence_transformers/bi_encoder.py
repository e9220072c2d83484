"""Losses on the embeddings of a SentenceTransformer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator
from torch import Tensor, nn
from torch.func import functional_call

from rankgrad import _check
from rankgrad.distributed import Processes
from rankgrad.engine.precision import without_autocast
from rankgrad.integrations.sentence_transformers.list_losses import ListLossFunction, described
from rankgrad.losses import AveragePrecisionLoss, NDCGLoss, ProxyRankingLoss, SpearmanLoss
from rankgrad.losses.embedding import EmbeddingLoss
from rankgrad.memory import EmbeddingMemory
from rankgrad.pairs import Lookup, unit_length


class RankingLoss(nn.Module):
    """A ranking loss on the embeddings of a SentenceTransformer; scores are cosine similarities.

    What is ranked follows from the columns of the data set:

    | columns | label | one list is | default loss |
    |---|---|---|---|
    | text | a class, integer | one text against the batch; its class is relevant | AveragePrecisionLoss |
    | query, positive, negatives ... | none | a query against all documents of the batch | AveragePrecisionLoss |
    | query, document_1 ... document_n | n grades >= 0 | a query against its documents | NDCG |
    | text, text | a number | all pairs of the batch, to be ordered as their numbers | Spearman |

    Pairs with numbers make one list of the batch: take 16 pairs or more, or a wider window, since a short list
    often has no gradient (see :func:`rankgrad.spearman_loss`).

    A grade below 0 marks a document that does not exist, for lists of different lengths. Works inside
    ``MatryoshkaLoss``: a memory is then kept for each dimension, and shorter embeddings are compared with as many
    leading numbers of the proxies. Evaluation never enters the memory.

    Args:
        model: The SentenceTransformer.
        loss: :class:`rankgrad.RecallLoss` or :class:`rankgrad.AveragePrecisionLoss` for the first two rows of the
            table, :class:`rankgrad.ProxyRankingLoss` for the first (its proxies need a rate of their own: give the
            trainer an optimiser of :func:`rankgrad.parameter_groups`); for the last three any list loss
            ``loss(scores, relevance, mask=mask)``, such as ``functools.partial(rankgrad.ndcg_loss, window=0.1)``.
            None: see the table.
        in_batch: Whether the graded documents of the other queries are candidates too, with grade 0.
        distributed: Whether the batches of all processes are ranked as one, for list losses and the defaults
            (the losses on embeddings have the argument themselves). Value and gradient are those of one process
            with the whole batch; for that, embeddings are gathered (of pairs: scores).
        process_group: Which processes; None: all.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import StaticEmbedding
        >>> from tokenizers import Tokenizer
        >>> from tokenizers.models import WordLevel
        >>> from rankgrad.integrations.sentence_transformers import RankingLoss
        >>> words = Tokenizer(WordLevel({"cat": 0, "kitten": 1, "car": 2, "truck": 3}, unk_token="cat"))
        >>> model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=8)], device="cpu")
        >>> texts = model.preprocess(["cat", "kitten", "car", "truck"])
        >>> RankingLoss(model)([texts], torch.tensor([0, 0, 1, 1])).backward()
    """

    def __init__(
        self,
        model: BaseModel,
        loss: nn.Module | ListLossFunction | None = None,
        *,
        in_batch: bool = True,
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise _check.fail("model", "a SentenceTransformer", model)
        if loss is not None and not callable(loss):
            raise _check.fail("loss", "a rankgrad loss or a callable loss(scores, relevance, mask=mask)", loss)
        self.model, self.loss, self.in_batch = model, loss, bool(in_batch)
        self.processes = Processes(distributed, process_group)
        if isinstance(loss, EmbeddingLoss | ProxyRankingLoss):
            if distributed:
                expected = f"False, and {type(loss).__name__}(distributed=True) instead"
                raise _check.fail("distributed", expected, distributed)
            self.processes = loss.processes
        self.by_size = nn.ModuleDict()  # of a loss with memory: its copies for other embedding sizes

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """The loss of a batch, as the trainer passes it.

        Args:
            sentence_features: For each column of texts the model's inputs: token ids ``[B, tokens]`` and so on.
            labels: ``[B]`` classes or numbers, ``[B, n]`` grades, or None; see the table above.
        """
        return self._loss([self.model(features)["sentence_embedding"] for features in sentence_features], labels)

    def _loss(self, columns: list[Tensor], labels: Tensor | None) -> Tensor:
        if not columns:
            raise _check.fail("sentence_features", "at least one column of texts", columns)
        if labels is not None and not isinstance(labels, Tensor):
            raise _check.fail("label", "a tensor of numbers, lists of grades being of one length", labels)
        if len(columns) == 1:
            return self._of_classes(columns[0], labels)
        if labels is None:
            return self._of_positives(columns[0], columns[1:])
        if labels.ndim == 2:
            return self._of_grades(columns[0], columns[1:], labels)
        return self._of_pairs(columns, labels)

    def _of_classes(self, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None or labels.ndim != 1 or labels.is_floating_point():
            raise _check.fail("label", "one integer beside one column of texts", labels)
        loss = self._default() if self.loss is None else self.loss
        if not isinstance(loss, EmbeddingLoss | ProxyRankingLoss):
            raise _check.fail("loss", "RecallLoss, AveragePrecisionLoss or ProxyRankingLoss for classes", loss)
        if isinstance(loss, EmbeddingLoss) and loss.memory.rows:
            loss = self._of_size(loss, embeddings.shape[1])
        loss.train(self.training and self.model.training and torch.is_grad_enabled())
        given, size = (embeddings, labels.long()), embeddings.shape[1]
        if isinstance(loss, ProxyRankingLoss) and size < loss.proxies.shape[1]:  # embeddings cut by MatryoshkaLoss
            return functional_call(loss, {"proxies": loss.proxies[:, :size]}, given)  # type: ignore[no-any-return]
        result: Tensor = loss(*given)
        return result

    def _of_size(self, loss: EmbeddingLoss, size: int) -> EmbeddingLoss:
        """The loss whose memory holds embeddings of this size: MatryoshkaLoss uses several in a step."""
        if loss.memory.get_buffer("embeddings").shape[-1] == size:
            return loss
        if str(size) not in self.by_size:
            self._add_size(loss, str(size))
        return self.by_size[str(size)]  # type: ignore[return-value]

    def _add_size(self, loss: EmbeddingLoss, size: str) -> None:
        self.by_size[size] = copy = deepcopy(loss)
        copy.memory = EmbeddingMemory(loss.memory.size).to(loss.memory.position.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in list(state_dict):
            size = re.match(re.escape(f"{prefix}by_size.") + r"(\d+)\.", key)
            if size and size[1] not in self.by_size and isinstance(self.loss, EmbeddingLoss):
                self._add_size(self.loss, size[1])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _of_positives(self, queries: Tensor, documents: Sequence[Tensor]) -> Tensor:
        """Every query against the documents of all queries, in all processes; its own positive is relevant."""
        loss = self._default() if self.loss is None else self.loss
        if isinstance(loss, ProxyRankingLoss):
            raise _check.fail("label", "a class beside one column of texts for ProxyRankingLoss", None)
        if isinstance(loss, EmbeddingLoss) and loss.memory.size:
            # Documents of other batches are relevant to no query of this one: a remembered list would never count.
            raise _check.fail("memory", "0 for columns (query, positive, negatives)", loss.memory.size)
        gather, queries = self.processes.gather, unit_length(queries)
        own = self.processes.numbered(len(queries), queries.device)
        numbers = torch.cat([own, own.new_full((len(queries) * (len(documents) - 1),), -1)])
        candidates = unit_length(torch.cat(list(documents)))
        found = Lookup(queries, own, None, *map(gather, (candidates, numbers, numbers)))
        if isinstance(loss, EmbeddingLoss):
            return loss.mean([found])
        scores, relevance, mask = found._replace(queries=gather(queries), labels=gather(own)).pairs()
        return loss(scores, relevance, mask=mask)

    def _of_grades(self, queries: Tensor, documents: Sequence[Tensor], grades: Tensor) -> Tensor:
        if grades.shape[1] != len(documents):
            expected = f"{len(documents)} grades a query, one for each column behind the first"
            raise _check.fail("label", expected, grades)
        _check.numbers_of("label", grades)
        given = unit_length(queries), unit_length(torch.stack(list(documents), 1)), grades
        rows, stacked, grades = map(self.processes.gather, given)  # [B, dim], [B, n, dim], [B, n]
        if self.in_batch:
            scores = _cosines(rows, stacked.flatten(0, 1))
            own = torch.eye(len(grades), dtype=torch.bool, device=grades.device)
            own = own.repeat_interleave(len(documents), 1)
            all_grades = grades.flatten().expand(len(grades), -1)
            grades, mask = all_grades.where(own, 0), ~(all_grades < 0)
        else:
            scores, mask = _dot(rows.unsqueeze(1), stacked), ~(grades < 0)
        return self._list_loss(NDCGLoss())(scores, grades.clamp(min=0), mask=mask)

    def _of_pairs(self, columns: Sequence[Tensor], numbers: Tensor) -> Tensor:
        if len(columns) != 2 or numbers.shape != columns[0].shape[:1]:
            raise _check.fail("label", f"one number a pair, or {len(columns) - 1} grades a query", numbers)
        _check.numbers_of("label", numbers)
        scores, numbers = map(self.processes.gather, (_dot(*map(unit_length, columns)), numbers))
        return self._list_loss(SpearmanLoss())(scores, numbers, mask=None)

    def _default(self) -> AveragePrecisionLoss:
        return AveragePrecisionLoss(distributed=self.processes.shared, process_group=self.processes.group)

    def _list_loss(self, default: ListLossFunction) -> ListLossFunction:
        if isinstance(self.loss, EmbeddingLoss | ProxyRankingLoss):
            raise _check.fail("loss", "a list loss(scores, relevance, mask=mask) for graded texts", self.loss)
        return default if self.loss is None else self.loss

    def get_config_dict(self) -> dict[str, Any]:
        """The settings of the loss, for the model card."""
        return {"loss": described(self.loss), "in_batch": self.in_batch}


class CachedRankingLoss(CachedLossMixin, RankingLoss):
    """:class:`RankingLoss` of batches that do not fit into memory, by gradient caching (Gao et al. 2021).

    Texts are embedded ``mini_batch_size`` at a time without gradients, the loss of the whole batch gives the
    gradient of each embedding, and the texts are embedded once more to pass it on. The gradients are those of
    :class:`RankingLoss`; a step takes about a forward pass more, and memory for one mini-batch.

    Args:
        model, loss, in_batch, distributed, process_group: As in :class:`RankingLoss`.
        mini_batch_size: How many texts are embedded at a time.
        show_progress_bar: Whether to show one for every batch.

    Example:
        >>> model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2")  # doctest: +SKIP
        >>> loss = CachedRankingLoss(model, mini_batch_size=64)  # doctest: +SKIP
        >>> trainer = SentenceTransformerTrainer(model, loss=loss, ...)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: BaseModel,
        loss: nn.Module | ListLossFunction | None = None,
        *,
        in_batch: bool = True,
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
        mini_batch_size: int = 32,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__(model, loss, in_batch=in_batch, distributed=distributed, process_group=process_group)
        if has_static_embedding_input(model):
            raise _check.fail("model", "token ids that can be cut into mini-batches, not a StaticEmbedding", model)
        self.mini_batch_size = _check.count("mini_batch_size", mini_batch_size, at_least=1)
        self.show_progress_bar = bool(show_progress_bar)
        self._own: list[tuple[nn.Parameter, Tensor]] = []  # parameters of the loss and their gradients

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """As :meth:`RankingLoss.forward`: token ids ``[B, tokens]`` of each column of texts, and labels."""
        self._own = []
        loss: Tensor = CachedLossMixin.forward_cached(self, list(sentence_features), labels)
        own, self._own = self._own, []

        def pass_on(upstream: Tensor) -> None:
            for parameter, gradient in own:
                gradient = gradient * upstream
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        if own and loss.requires_grad:
            loss.register_hook(pass_on)
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of embeddings; ``with_backward`` stores the gradient of each in its ``grad``."""
        loss = self._loss([torch.cat(parts) for parts in reps], labels)
        if not with_backward:
            return loss
        parts = [part for column in reps for part in column]
        own = [p for p in self.loss.parameters() if p.requires_grad] if isinstance(self.loss, nn.Module) else []
        gradients = torch.autograd.grad(loss, [*parts, *own])
        for part, gradient in zip(parts, gradients, strict=False):
            part.grad = gradient
        # The hook above adds these at backward, times the upstream gradient, as the mixin does for the texts.
        weight = self._weight_of_size(parts[0].shape[1])
        self._own += [(p, weight * gradient) for p, gradient in zip(own, gradients[len(parts) :], strict=True)]
        return loss.detach()

    def _weight_of_size(self, size: int) -> float:
        """The weight MatryoshkaLoss gives this embedding size: it applies it to the gradients of texts only."""
        nested = vars(self).get("calculate_loss")
        if not isinstance(nested, CachedLossDecorator):
            return 1.0
        return float(dict(zip(nested.matryoshka_dims, nested.matryoshka_weights, strict=True))[size])

    def get_config_dict(self) -> dict[str, Any]:
        """The settings of the loss, for the model card."""
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}


def _cosines(queries: Tensor, documents: Tensor) -> Tensor:
    with without_autocast(queries.device.type):
        return queries @ documents.T.to(queries.dtype)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(-1)
