"""A wrong argument is named, with what was received."""

import pytest
import torch

import rankgrad

S, R = torch.randn(3, 5), torch.zeros(3, 5, dtype=torch.bool)
E, L = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
LIST_LOSSES = [
    rankgrad.recall_loss,
    rankgrad.average_precision_loss,
    rankgrad.mean_average_precision_loss,
    rankgrad.pooled_average_precision_loss,
]


@pytest.mark.parametrize("loss", LIST_LOSSES)
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"lam": 0}, ValueError, r"^lam: expected a finite number > 0 .*received 0 \(int\)"),
        ({"lam": -1.0}, ValueError, "^lam: .*-1.0"),
        ({"lam": float("nan")}, ValueError, "^lam: .*nan"),
        ({"lam": float("inf")}, ValueError, "^lam: .*inf"),
        ({"lam": "big"}, TypeError, "^lam: expected a number, received 'big'"),
        ({"margin": -0.1}, ValueError, "^margin: .*-0.1"),
        ({"margin": "big"}, ValueError, "^margin: expected a number >= 0 or 'auto', received 'big'"),
        ({"lam": None, "window": "auto"}, TypeError, "^window: expected a number, or None to take the reach from"),
        ({"relevance": R[:, :4].long()}, ValueError, "received an int64 tensor of shape"),
        ({"scores": [0.1, 0.2]}, TypeError, "^scores: expected a tensor"),
        ({"scores": torch.zeros(3, 5, dtype=torch.int64)}, TypeError, "^scores: .*floating.*int64"),
        ({"relevance": R[:, :4]}, ValueError, r"^relevance: .*\[3, 5\].*\[3, 4\]"),
        ({"relevance": R.tolist()}, TypeError, "^relevance: expected a tensor"),
        ({"relevance": R.to("meta")}, ValueError, "^relevance: .*device.*meta"),
        ({"relevance": R.int() + 2}, ValueError, "^relevance: expected only 0 and 1"),
        ({"relevance": R.float() + 0.5}, ValueError, "^relevance: expected only 0 and 1"),
        ({"mask": torch.ones(3, 5)}, TypeError, "^mask: expected a bool tensor.*float32"),
        ({"mask": torch.ones(4, 5, dtype=torch.bool)}, ValueError, r"^mask: .*broadcast.*\[3, 5\].*\[4, 5\]"),
        ({"scores": S.masked_fill(torch.eye(3, 5) > 0, torch.nan)}, ValueError, "^scores: expected no NaN"),
    ],
)
def test_list_losses(loss, kwargs, error, message):
    scores, relevance = kwargs.get("scores", S), kwargs.get("relevance", R)
    rest = {"lam": 1.0} | {k: v for k, v in kwargs.items() if k not in ("scores", "relevance")}
    with pytest.raises(error, match=message):
        loss(scores, relevance, **rest)


def test_a_device_without_float64_is_named():
    """MPS has no float64, in which steps are computed; a tensor of that device exists here in name only."""

    class OnMPS(torch.Tensor):
        device = torch.device("mps")

    scores = torch.rand(3).as_subclass(OnMPS)
    for call, name in (
        (lambda: rankgrad.average_precision_loss(scores, R[0, :3]), "scores"),
        (lambda: rankgrad.rank(scores, lam=1.0), "scores"),
        (lambda: rankgrad.metrics.ndcg(scores, R[0, :3]), "scores"),
        (lambda: rankgrad.RecallLoss()(scores.reshape(1, 3), torch.tensor([0])), "embeddings"),
    ):
        message = (
            rf"^{name}: expected on a device with float64 \(a CPU or CUDA\), received on mps; pass {name}.cpu"
        )
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rankgrad.recall_loss(S, R, lam=1.0, weight="lgo"), ValueError, "^weight: .*'log'.*'lgo'"),
        (lambda: rankgrad.recall_loss(S, R, lam=1.0, weight=torch.ones(2, 2)), ValueError, "^weight: .*1-D"),
        (
            lambda: rankgrad.recall_loss(S, R, weight=torch.ones(2, requires_grad=True)),
            ValueError,
            "^weight: .*without gradient.*callable",
        ),
        (lambda: rankgrad.spearman_loss(S, S, spread=torch.ones(3)), ValueError, "^spread: expected one"),
        (lambda: rankgrad.ndcg_loss(S, R, spread=torch.ones(3)), ValueError, "^spread: expected one"),
        (lambda: rankgrad.rank_loss(lambda r: r[..., 0], S, spread=torch.ones(4)), ValueError, "^spread: exp"),
        (
            lambda: rankgrad.RecallLoss()(S, torch.tensor([0, 0, 1]), items=torch.full((3,), -1)),
            ValueError,
            "^items: expected finite numbers >= 0, received -1",
        ),
        (
            lambda: rankgrad.retrieval_pairs(S, torch.arange(3), S[:2], torch.arange(2), torch.arange(3)),
            ValueError,
            "^query_index: expected rows of the 2 references, or -1, received 2",
        ),
        (
            lambda: rankgrad.retrieval_pairs(S, torch.arange(3), S[:2], torch.arange(2), torch.arange(3) - 2),
            ValueError,
            "^query_index: expected rows of the 2 references, or -1, received -2",
        ),
        (
            lambda: rankgrad.recall_loss(S, R, lam=1.0, weight=lambda c: c.sum()),
            ValueError,
            "^weight: .*shape",
        ),
        (lambda: rankgrad.recall_loss(S, R, lam=1.0, reduction="avg"), ValueError, "^reduction: .*'avg'"),
        (lambda: rankgrad.recall_loss(S, R, weight=[1.0, -0.5]), ValueError, "^weight: .*>= 0, received -0.5"),
        (lambda: rankgrad.recall_loss(S, R, weight=[1.0, "x"]), TypeError, "^weight: .* received 'x'"),
        (lambda: rankgrad.recall_loss(S, R, weight=torch.tensor([1, torch.nan])), ValueError, "^weight: .*nan"),
        (lambda: rankgrad.recall_loss(S, R, weight=torch.tensor([-1.0])), ValueError, "^weight: .*received -1.0"),
        (lambda: rankgrad.recall_loss(S, R, lists=torch.tensor(-3)), ValueError, "^lists: .*received -3"),
        (lambda: rankgrad.recall_loss(S, R, spread=torch.tensor(0.0)), ValueError, "^spread: .*> 0, received 0.0"),
        (lambda: rankgrad.ndcg_loss(S, R, spread=torch.tensor(torch.inf)), ValueError, "^spread: .*inf"),
        (lambda: rankgrad.recall_loss(S.to_sparse(), R), TypeError, "^scores: expected a dense tensor"),
        (lambda: rankgrad.recall_loss(S.to(torch.float8_e5m2), R), TypeError, "^scores: .* 16 bits or more"),
        (
            lambda: rankgrad.recall_loss(S[0, 0], R[0, 0], lam=1.0),
            ValueError,
            "^scores: at least|^scores: expected at least",
        ),
        (
            lambda: rankgrad.mean_average_precision_loss(S[0], R[0], lam=1.0),
            ValueError,
            "^scores: expected 2 dim",
        ),
        (lambda: rankgrad.rank(S, lam=1.0, ties="dense"), ValueError, "^ties: .*'dense'"),
        (lambda: rankgrad.rank(S, lam=1.0, dim=2), ValueError, "^dim: .*2"),
        (lambda: rankgrad.rank(S, lam=-1.0), ValueError, "^lam"),
        (lambda: rankgrad.rank(S * torch.nan, lam=1.0), ValueError, "^scores: expected no NaN"),
        (lambda: rankgrad.blackbox(3, lam=1.0), TypeError, "^solver"),
        (lambda: rankgrad.blackbox(lambda y: y[:1], lam=1.0)(S), ValueError, "^solver: .*shape"),
        (lambda: rankgrad.rank_loss(3, S, lam=1.0), TypeError, "^fn"),
        (lambda: rankgrad.rank_loss(lambda r: r.sum(), S, lam=1.0), ValueError, "^fn: .*one loss per list"),
        (
            lambda: rankgrad.ndcg_loss(S * torch.nan, R * 0),
            ValueError,
            "^scores: expected no NaN",
        ),  # without any gain
        (lambda: rankgrad.ndcg_loss(S, R, lam=1.0, gain="log"), ValueError, "^gain: .*'log'"),
        (lambda: rankgrad.spearman_loss(S, S[:2], lam=1.0), ValueError, "^target:"),
        (lambda: rankgrad.spearman_loss(S, target_ranks=S[:2], lam=1.0), ValueError, "^target_ranks:"),
        (lambda: rankgrad.spearman_loss(S, lam=1.0), ValueError, "^target, target_ranks: .*received neither"),
        (lambda: rankgrad.spearman_loss(S, S, target_ranks=S), ValueError, "^target, target_ranks: .*both"),
        (lambda: rankgrad.metrics.recall_at_k(S, R, k=0), ValueError, "^k: .*>= 1, received 0"),
        (lambda: rankgrad.metrics.precision_at_k(S, R, k=1.5), TypeError, "^k: expected an integer"),
        (lambda: rankgrad.metrics.average_precision(S, R, reduction="sum"), ValueError, "^reduction"),
        (
            lambda: rankgrad.metrics.average_precision(S * torch.nan, R),
            ValueError,
            "^scores: expected no NaN",
        ),
        (lambda: rankgrad.RecallLoss(lam=0.0), ValueError, "^lam"),
        (lambda: rankgrad.RecallLoss(memory=-1), ValueError, "^memory: .*-1"),
        (lambda: rankgrad.RecallLoss(memory=1.5), TypeError, "^memory"),
        (lambda: rankgrad.RecallLoss(weight="x"), ValueError, "^weight"),
        (lambda: rankgrad.RecallLoss()(E, L[:5]), ValueError, r"^labels: .*\[6\].*\[5\]"),
        (lambda: rankgrad.RecallLoss()(E, L.float()), TypeError, "^labels: expected integers"),
        (lambda: rankgrad.RecallLoss()(E, L.to(torch.uint16)), TypeError, r"uint16.*; pass labels\.long\(\)$"),
        (
            lambda: rankgrad.RecallLoss()(E.numpy(), L),
            TypeError,
            r"^embeddings: .* a float32 array of shape \[6, 4\]$",
        ),
        (lambda: rankgrad.RecallLoss()(E, list(range(9999))), TypeError, r"^labels: .{,260}\.\.\. \(list\)$"),
        (lambda: rankgrad.RecallLoss()(E[0], L), ValueError, "^embeddings: expected 2 dim"),
        (lambda: rankgrad.RecallLoss()(E, L, E), ValueError, "^ref_labels"),
        (lambda: rankgrad.RecallLoss()(E, L, E[:, :3], L), ValueError, "^ref_embeddings: .*length 4"),
        (lambda: rankgrad.RecallLoss()(E, L, query_index=L), ValueError, "^query_index"),
        (lambda: rankgrad.RecallLoss()(E, L.to("meta")), ValueError, "^labels: .*device"),
        (lambda: rankgrad.ClassRankingLoss(form="aap"), ValueError, "^form: .*'aap'"),
        (
            lambda: rankgrad.ClassRankingLoss(map_weight=0, pooled_weight=0),
            ValueError,
            "^map_weight, pooled_weight",
        ),
        (lambda: rankgrad.ClassRankingLoss(0.5), TypeError, "positional"),
        (lambda: rankgrad.NDCGLoss(10), TypeError, "positional"),
        (lambda: rankgrad.ScoreMemory(-1), ValueError, "^size"),
        (lambda: rankgrad.EmbeddingMemory(1).push(E, L, L - 2), ValueError, "^items: .*received -2"),
        (
            lambda: [m := rankgrad.EmbeddingMemory(1), m.push(E, L), m.push(E[:, :2], L)],
            ValueError,
            r"^embeddings: .*\[4\]",
        ),
    ],
)
def test_everything_else(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_mps_is_refused():
    """It has no float64. None is here: a tensor that says it is on one."""

    class OnMPS(torch.Tensor):
        device = torch.device("mps")

    with pytest.raises(ValueError, match=r"^scores: expected on a device with float64.* pass scores\.cpu\(\)"):
        rankgrad.average_precision_loss(S.as_subclass(OnMPS), R)
    with pytest.raises(ValueError, match=r"^embeddings: expected on a device with float64.* received on mps"):
        rankgrad.RecallLoss()(E.as_subclass(OnMPS), L)


@pytest.mark.parametrize("name", ["lists", "spread"])
def test_what_other_processes_know_is_on_the_device_of_the_scores(name):
    value = torch.tensor(3 if name == "lists" else 0.5, device="meta")
    with pytest.raises(ValueError, match=f"{name}: expected on the device of scores"):
        rankgrad.average_precision_loss(torch.randn(2, 9), torch.rand(2, 9) < 0.5, **{name: value})


def test_a_gradient_of_tiny_scores_is_finite():
    scores = (torch.randn(50) * 1e-36).requires_grad_()
    (65536 * rankgrad.average_precision_loss(scores, torch.arange(50) % 7 == 0)).backward()
    assert scores.grad.isfinite().all() and scores.grad.abs().max() > 1e35


MANY = torch.arange(6) % 2
METRICS = rankgrad.metrics.retrieval_metrics(torch.eye(6), MANY)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rankgrad.ndcg_loss(S, R.float(), k=2**70), "k"),
        (lambda: rankgrad.NDCGLoss(k=2**70), "k"),
        (lambda: rankgrad.metrics.ndcg(S, R.float(), k=2**70), "k"),
        (lambda: rankgrad.metrics.recall_at_k(S, R, k=2**70), "k"),
        (lambda: METRICS.summary([1, 10**30]), "recall_at"),
        (lambda: rankgrad.recall_loss(S[0], R[0], groups=MANY[:5], num_groups=2**70), "num_groups"),
        (lambda: rankgrad.recall_loss(S[0], R[0], groups=MANY[:5], num_groups=10**12), "num_groups"),
        (lambda: rankgrad.ProxyRankingLoss(2**70, 8), "num_classes"),
        (lambda: rankgrad.ProxyRankingLoss(10**15, 8), "num_classes"),
        (lambda: rankgrad.ProxyRankingLoss(8, 10**15), "embedding_size"),
        (lambda: rankgrad.EmbeddingMemory(10**30), "size"),
        (lambda: rankgrad.ScoreMemory(10**12), "size"),
        (lambda: rankgrad.RecallLoss(memory=10**30), "memory"),
        (lambda: rankgrad.RecallLoss(max_relevant=10**30), "max_relevant"),
    ],
)  # fmt: skip
def test_counts_that_nothing_holds(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected an integer <= \d+, received 1\d+ \(int\)$"):
        call()
