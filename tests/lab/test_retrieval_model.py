"""The network and the losses by name."""

import itertools

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models

import rankgrad
from rankgrad.lab.retrieval import losses
from rankgrad.lab.retrieval.images import model
from rankgrad.lab.retrieval.images.config import Model, View
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.named import Named

IMAGES = torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("tiny", 512),
        ("resnet18", 512),
        ("torchvision:mobilenet_v3_small", 1024),
        ("timm:resnet10t", 512),
        ("timm:levit_128s", 384),
    ],
)
def test_backbones_by_name(name, features):
    crop = 224 if "levit" in name else 64
    network, _ = model.build(Model(backbone=name, weights="none", embedding=7), crop, 0)
    assert network.embedding.in_features == features
    assert network.eval()(torch.randn(2, 3, crop, crop)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "resnet5",
            "unknown name 'resnet5', did you mean 'resnet50'|unknown name 'resnet5', did you mean 'resnet",
        ),
        ("timmm:resnet18", "unknown library 'timmm', did you mean 'timm'"),
        ("torchvision:resnet10t", "unknown name 'torchvision:resnet10t'"),
        (
            "r3d_18",
            "'r3d_18' of torchvision does not classify images; expected one of torchvision's image classifiers",
        ),
        (
            "fasterrcnn_resnet50_fpn",
            "'fasterrcnn_resnet50_fpn' of torchvision does not classify images; expected one of",
        ),
        (
            "torchvision:deeplabv3_resnet50",
            "'deeplabv3_resnet50' of torchvision does not classify images; expected one of",
        ),
        ("squeezenet1_0", "SqueezeNet ends without a linear layer; expected one of torchvision's"),
    ],
)
def test_unknown_backbones(name, message):
    with pytest.raises(UserError, match=message):
        model.build(Model(backbone=name, weights="none"), 64, 0)


def test_the_seed_makes_the_network():
    make = lambda seed: model.build(Model(backbone="tiny", weights="none", embedding=4), 16, seed)[0].state_dict()  # noqa: E731
    assert all(torch.equal(a, b) for a, b in zip(make(1).values(), make(1).values(), strict=True))
    assert not torch.equal(make(1)["embedding.weight"], make(2)["embedding.weight"])


def test_embeddings_are_float32_under_autocast():
    network, _ = model.build(Model(backbone="tiny", weights="none", embedding=4), 16, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = network(torch.randn(64, 3, 16, 16))
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.bfloat16().float())


def test_frozen_batch_norm_keeps_its_statistics(tmp_path):
    save_file(model.tiny().state_dict(), tmp_path / "w.safetensors")
    for kind, weights in itertools.product(
        ("frozen", "fixed", "train"), (str(tmp_path / "w.safetensors"), "none")
    ):
        settings = Model(backbone="tiny", weights=weights, embedding=4, batch_norm=kind)
        network, _ = model.build(settings, 16, 0)
        frozen = kind != "train" and weights != "none"  # untrained networks have no statistics to keep
        norm = network.backbone[1]
        before = norm.running_mean.clone()
        network.train()(torch.randn(4, 3, 16, 16)).sum().backward()
        assert network.training and norm.training != frozen
        assert torch.equal(norm.running_mean, before) == frozen
        assert norm.weight.requires_grad == norm.bias.requires_grad == (not frozen or kind == "frozen")
        assert (norm.weight.grad is None) == (kind == "fixed" and frozen)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(1)
    return {n: t for n, t in models.resnet50().state_dict().items() if not n.startswith("fc.")}


def resnet(path):
    return Model(backbone="resnet50", weights=str(path), embedding=4)


def test_weights_from_a_file(tmp_path, weights):
    save_file(weights, tmp_path / "w.safetensors")
    network, notes = model.build(resnet(tmp_path / "w.safetensors"), 64, 0)
    assert notes == {"stride_in_1x1": False}
    assert torch.equal(network.backbone.layer4[2].conv3.weight, weights["layer4.2.conv3.weight"])
    block = network.backbone.layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


def test_the_stride_of_the_file_is_honoured_and_remembered(tmp_path, weights):
    half = {n: t.half() if t.ndim == 4 else t for n, t in weights.items() if "num_batches" not in n}
    save_file(half, tmp_path / "w.safetensors", metadata={"stride_in_1x1": "true"})
    network, notes = model.build(resnet(tmp_path / "w.safetensors"), 64, 0)
    blocks = [network.backbone.layer2[0], network.backbone.layer3[0], network.backbone.layer4[0]]
    assert [(b.conv1.stride, b.conv2.stride) for b in blocks] == [((2, 2), (1, 1))] * 3
    assert network.backbone.layer1[0].conv1.stride == (1, 1)
    again = model.rebuild(Model(backbone="resnet50", weights="gone", embedding=4), 64, notes, network.state_dict())
    assert torch.equal(again.eval()(IMAGES), network.eval()(IMAGES))


def test_weights_that_do_not_fit(tmp_path, weights):
    with pytest.raises(UserError, match=r"expected library, none or a safetensors file.*nowhere"):
        model.build(resnet(tmp_path / "nowhere.safetensors"), 64, 0)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(UserError, match=r"expected a safetensors file"):
        model.build(resnet(tmp_path / "text.safetensors"), 64, 0)
    save_file({n: t for n, t in weights.items() if not n.startswith("layer4.2.conv")}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"lacks 3 of \d+ tensors of the backbone: layer4\.2\.conv1\.weight"):
        model.build(resnet(tmp_path / "w.safetensors"), 64, 0)
    save_file(weights | {"bn1.weight": torch.zeros(3)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"bn1\.weight expected in shape \[64\], received \[3\]"):
        model.build(resnet(tmp_path / "w.safetensors"), 64, 0)
    small = {n: t for n, t in models.resnet18().state_dict().items() if not n.startswith("fc.")}
    save_file(small, tmp_path / "w.safetensors", metadata={"stride_in_1x1": "true"})
    with pytest.raises(UserError, match=r"stride_in_1x1, which only ResNets with bottleneck"):
        model.build(Model(backbone="resnet18", weights=str(tmp_path / "w.safetensors")), 64, 0)


# ------------------------------------------------------------------------------------------- losses

E, L, ITEMS = torch.randn(12, 8), torch.arange(4).repeat(3), torch.arange(12)


def make(name, miner=None, **arguments):
    return losses.build(Named(name=name, **arguments), miner, classes=4, embedding=8)


@pytest.mark.parametrize("name", ["recall", "ap", "pair"])
def test_our_losses_by_name(name):
    kinds = {"recall": rankgrad.RecallLoss, "ap": rankgrad.AveragePrecisionLoss, "pair": rankgrad.PairRankingLoss}
    ours = kinds[name](lam=3.0, memory=2, margin=0.1)
    found = make(name, lam=3.0, memory=2, margin=0.1)
    for _ in range(3):
        assert torch.equal(found(E, L, ITEMS), ours(E, L))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("FastAPLoss", {"num_bins": 10}),
        ("SmoothAPLoss", {}),
        ("MultiSimilarityLoss", {"alpha": 2, "beta": 50}),
        ("TripletMarginLoss", {"margin": 0.1}),
        ("ContrastiveLoss", {"neg_margin": 0.5}),
        ("ProxyNCALoss", {"softmax_scale": 3}),
        ("ProxyAnchorLoss", {"margin": 0.1}),
    ],
)
def test_losses_of_pytorch_metric_learning(name, arguments):
    from pytorch_metric_learning import losses as theirs

    found = make(f"pml:{name}", **arguments)
    proxies = {"num_classes": 4, "embedding_size": 8} if "Proxy" in name else {}
    loss = getattr(theirs, name)(**arguments, **proxies)
    loss.load_state_dict(found.loss.state_dict())
    assert len(list(found.parameters())) == bool(proxies)
    expected = loss(E, L)
    torch.testing.assert_close(found(E, L, ITEMS), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # in bf16 most cosines would be ties
        torch.testing.assert_close(found(E, L, ITEMS), expected)


def test_surrogates_of_the_library():
    from rankgrad.pairs import retrieval_pairs
    from rankgrad.surrogates import smoothap_loss

    found = make("surrogate:smoothap", temperature=0.05)
    pairs = retrieval_pairs(E, L)
    expected = smoothap_loss(pairs.scores, pairs.relevance, mask=pairs.mask, temperature=0.05)
    torch.testing.assert_close(found(E, L, ITEMS), expected)
    perfect = torch.nn.functional.one_hot(L, 8).float()
    assert found(perfect, L, ITEMS).item() < 1e-3
    twice = ITEMS.clone()
    twice[4] = 0  # rows 0 and 4 are one item, of one class: nothing to find in each other
    assert not torch.isclose(found(E, L, twice), expected)


def test_miners():
    from pytorch_metric_learning import losses as theirs
    from pytorch_metric_learning import miners

    arguments = {"margin": 0.2, "type_of_triplets": "semihard"}
    found = make("pml:TripletMarginLoss", Named(name="pml:TripletMarginMiner", **arguments), margin=0.2)
    expected = theirs.TripletMarginLoss(margin=0.2)(E, L, miners.TripletMarginMiner(**arguments)(E, L))
    torch.testing.assert_close(found(E, L, ITEMS), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("recal"), "^loss: unknown name 'recal', did you mean 'recall'"),
        (lambda: make("pml:FastAPLos"), "^loss: unknown name 'pml:FastAPLos', did you mean 'pml:FastAPLoss'"),
        (
            lambda: make("surrogate:smoothapp"),
            "^loss: unknown name 'surrogate:smoothapp', did you mean 'surrogate:smoothap'",
        ),
        (lambda: make("surrogate:smoothap", tau=1), r"^loss\.tau: unknown argument of smoothap"),
        (lambda: make("recall", lamm=1), r"^loss\.lamm: unknown argument of RecallLoss, did you mean 'lam'"),
        (lambda: make("recall", lam=-1), r"^loss: RecallLoss: lam: expected a finite number > 0.*received -1"),
        (lambda: make("pml:FastAPLoss", bins=1), r"^loss\.bins: unknown argument of FastAPLoss"),
        (lambda: make("pml:TripletMarginLoss", Named(name="pml:Tripelt")), "^miner: unknown name 'pml:Tripelt'"),
        (lambda: make("pml:ContrastiveLoss", Named(name="TripletMarginMiner")), "^miner: unknown name"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


@pytest.mark.parametrize("kind", [rankgrad.RecallLoss, rankgrad.AveragePrecisionLoss])
def test_an_image_that_is_twice_in_a_batch_is_left_out_of_its_own_list(kind):
    """Copies of an image are no candidates of each other; to all others each copy is a candidate.

    The margin is a number: "auto" would be another one for every call of a single query.
    """
    loss = kind(lam=5.0, margin=0.05)
    x = torch.randn(6, 5, dtype=torch.float64)
    x[3] = x[0]
    labels, items = torch.tensor([0, 0, 1, 0, 1, 1]), torch.tensor([7, 3, 2, 7, 9, 4])
    expected = []
    for i in range(6):
        kept = [j for j in range(6) if items[j] != items[i]]
        expected.append(loss(x[i : i + 1], labels[i : i + 1], x[kept], labels[kept]))
    assert loss(x, labels, items=items).item() == pytest.approx(torch.stack(expected).mean().item())
    with pytest.raises(ValueError, match=r"^items: expected None with ref_embeddings"):
        loss(x, labels, x, labels, items=items)
    with pytest.raises(ValueError, match=r"^items: .*"):
        loss(x, labels, items=items[:3])


def test_modules_say_nothing_of_processes_where_there_is_one():
    alone, spread = rankgrad.RecallLoss(lam=3.0), rankgrad.RecallLoss(lam=3.0, distributed=True)
    assert torch.equal(alone(E, L), spread(E, L))
    assert isinstance(spread, nn.Module)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18"])
def test_where_the_weights_cannot_be_fetched(name, monkeypatch):
    def fetch(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    monkeypatch.setattr("timm.models._builder.load_pretrained", fetch)
    with pytest.raises(UserError, match=r"library's weights of resnet18 cannot be fetched \(no route\)"):
        model.build(Model(backbone=name), 32, 0)


def test_every_name_of_torchvision_has_a_view_or_a_message():
    """Weights of detectors, videos and masks say nothing about the size of an image."""
    classifiers = models.list_models(module=models)
    for name in models.list_models():
        config = Model(backbone=f"torchvision:{name}", weights="library")
        if name in classifiers:
            view = model.complete_view(View(), config)
            assert view.resize >= view.crop >= 224
        else:
            with pytest.raises(UserError, match=f"{name}' of torchvision does not classify images; expected"):
                model.complete_view(View(), config)


def test_a_network_that_returns_more_in_training():
    network, _ = model.build(Model(backbone="torchvision:googlenet", weights="none", embedding=8), 64, 0)
    assert network.train()(IMAGES).shape == (2, 8)
