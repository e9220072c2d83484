"""The head of the network: pooling, norm, what a backbone expects to see, and how its training begins."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms.v2.functional import center_crop

from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images import model
from rankgrad.lab.retrieval.images.config import Config, Model, View
from rankgrad.lab.retrieval.images.pooling import Pool
from rankgrad.lab.training import optim
from rankgrad.lab.training.config import Optim
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.loop import Trainer
from rankgrad.lab.vision.images import MEAN, STD

import images
from runs import rows


def by_hand(kind, values):
    average, largest = sum(values) / len(values), max(values)
    power_mean = (sum(max(v, 0) ** 3 for v in values) / len(values)) ** (1 / 3)
    return {"avg": average, "max": largest, "avg+max": average + largest, "gem": power_mean}[kind]


@pytest.mark.parametrize("kind", ["avg", "max", "avg+max", "gem"])
def test_pooling(kind):
    x = torch.randn(2, 3, 4, 5)
    expected = [[by_hand(kind, channel.flatten().tolist()) for channel in image] for image in x]
    torch.testing.assert_close(Pool(kind, flat=True)(x), torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert Pool(kind, flat=False)(x.bfloat16()).shape == (2, 3, 1, 1)
    assert Pool(kind, flat=False)(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["torchvision:resnet18", "torchvision:regnet_x_400mf", "timm:resnet10t", "timm:convnext_atto"]
)
def test_the_backbone_s_pooling_is_replaced(name):
    """Pooled by average it is the network as it comes; any other pooling is another function of the same map."""
    x = torch.randn(2, 3, 64, 64)
    outputs = {}
    for kind in ("own", "avg", "max", "avg+max", "gem", "auto"):
        settings = Model(backbone=name, weights="none", embedding=4, pooling=kind)
        network, _ = model.build(settings, 64, 0)
        outputs[kind] = network.eval()(x)
    torch.testing.assert_close(outputs["avg"], outputs["own"], atol=1e-5, rtol=1e-4)
    assert torch.equal(outputs["auto"], outputs["avg+max"])
    for kind in ("max", "avg+max", "gem"):
        assert not torch.allclose(outputs[kind], outputs["own"], atol=1e-3)


def test_networks_without_a_map_keep_their_pooling():
    for name in ("tiny", "timm:levit_128s"):
        crop = 224 if "levit" in name else 16
        model.build(Model(backbone=name, weights="none", pooling="auto"), crop, 0)
        with pytest.raises(
            UserError, match=r"^model\.pooling: .*no global average pooling that max could replace"
        ):
            model.build(Model(backbone=name, weights="none", pooling="max"), crop, 0)


def test_norm_before_the_embedding():
    network, _ = model.build(Model(backbone="tiny", weights="none", embedding=4, norm="layer"), 16, 0)
    seen = []
    network.embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    network.eval()(5 * torch.randn(2, 3, 16, 16))
    torch.testing.assert_close(seen[0].mean(1), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen[0].var(1, unbiased=False), torch.ones(2), atol=1e-2, rtol=0)
    assert not list(network.norm.parameters())


def test_a_backbone_sees_what_it_was_trained_on():
    import timm

    known = timm.get_pretrained_cfg("vit_small_patch16_224")
    assert tuple(known.mean) != MEAN  # else this shows nothing
    view = model.complete_view(View(), Model(backbone="timm:vit_small_patch16_224"))
    assert (view.mean, view.std) == (tuple(known.mean), tuple(known.std))
    assert (view.crop, view.resize) == (224, round(224 / known.crop_pct))
    view = model.complete_view(View(), Model(backbone="torchvision:efficientnet_b3"))
    assert (view.crop, view.resize, view.mean) == (300, 320, MEAN)  # torchvision's own
    view = model.complete_view(View(), Model(backbone="resnet50", weights="mine.safetensors"))
    assert (view.crop, view.resize, view.mean, view.std) == (224, 256, MEAN, STD)
    view = model.complete_view(View(crop=112, mean=(0, 0, 0)), Model(backbone="resnet50", weights="none"))
    assert (view.crop, view.resize, view.mean) == (112, 128, (0, 0, 0))
    assert model.complete_view(View(resize=64), Model(backbone="tiny")).crop == 64


@pytest.mark.parametrize(
    ("backbone", "given", "side"),
    [
        ("resnet50", {}, 288),  # 224 x 2 / (1 + sqrt(0.2)) x 224 / 256 = 270.9, up to a multiple of 32
        ("resnet50", {"scale": 1.0}, 224),
        ("resnet50", {"augment": "crop"}, 224),  # trains on images as large as it is tested on
        ("resnet50", {"test_crop": 256}, 256),
        ("resnet50", {"resize": 256, "crop": 224, "scale": 0.5}, 256),
        ("timm:convnext_tiny", {}, 320),
        ("timm:vit_tiny_patch16_224", {}, 224),  # takes no other size
        ("tiny", {}, 224),  # features of a grid
        ("vgg11", {}, 224),
    ],
)
def test_test_images_show_things_as_large_as_random_crops(backbone, given, side):
    view = model.complete_view(View(**given), Model(backbone=backbone, weights="mine.safetensors"))
    assert (view.crop, view.test_crop) == (224, side)


def test_crops_of_untrained_networks_show_most_of_an_image():
    for weights, scale in (("mine.safetensors", 0.2), ("library", 0.2), ("none", 0.6)):
        assert model.complete_view(View(), Model(weights=weights)).scale == scale
        assert model.complete_view(View(scale=0.4), Model(weights=weights)).scale == 0.4


def test_from_scratch_and_on_small_images_test_images_are_as_large_as_crops():
    assert model.complete_view(View(), Model(weights="none")).test_crop == 224
    assert model.complete_view(View(crop=112), Model(weights="mine.safetensors")).test_crop == 112


def test_the_same_square_is_tested_larger(tmp_path):
    root = images.folder_set(tmp_path, classes=4)
    overrides = [f"data.root={root}", "backbone=tiny", "weights=none", "view.resize=16", "view.crop=12"]
    kind, config = recipes.load("folder", [*overrides, "view.test_crop=24"])
    source = kind.sources(kind.completed(config), torch.device("cpu"), train=False).query
    halved = torch.nn.functional.avg_pool2d(source.inputs(torch.arange(6)), 2)
    whole = [source.store.fetch(torch.tensor([row])).image(0).permute(2, 0, 1).float() for row in range(6)]
    expected = torch.stack([center_crop(image, [12, 12]) for image in whole])
    assert halved.shape == expected.shape
    assert (
        torch.corrcoef(torch.stack([halved.flatten(), expected.flatten()]))[0, 1] > 0.6
    )  # 0.36 of a square of 8 or 16


def test_crops_are_normalised_for_the_backbone(tmp_path):
    root = images.folder_set(tmp_path, classes=4)
    overrides = [f"data.root={root}", "backbone=tiny", "weights=none", "view.resize=16", "view.crop=12"]
    kind, config = recipes.load("folder", overrides)
    plain = kind.sources(kind.completed(config), torch.device("cpu"), train=False).query
    _, config = recipes.load("folder", [*overrides, "view.mean=[0.5,0.5,0.5]", "view.std=[0.5,0.5,0.5]"])
    other = kind.sources(kind.completed(config), torch.device("cpu"), train=False).query
    pixels = plain.inputs(torch.arange(3)) * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    torch.testing.assert_close(other.inputs(torch.arange(3)), (pixels - 0.5) / 0.5, atol=1e-5, rtol=1e-5)


def test_rates_of_groups_that_begin_later():
    """Each warms up from where it begins; before that it has no rate and no gradient."""
    first, later = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    config = Optim(lr=1.0, warmup=2, schedule="constant", name="adam")
    optimizer = optim.make_optimizer([{"params": [first]}, {"params": [later], "begin": 1.5}], config)
    rates = []
    for step in range(6):
        optim.set_rates(optimizer, config, step, 2, 3)
        rates.append([group["lr"] for group in optimizer.param_groups])
        first.grad, later.grad = torch.ones(2), torch.ones(2)
        optim.hold_back(optimizer)
        assert (later.grad is None) == (step < 3) and first.grad is not None
    assert rates == [[0.5, 0], [1, 0], [1, 0], [1, 0.5], [1, 1], [1, 1]]


def test_at_first_only_the_head_learns(tmp_path):
    save_file(model.tiny().state_dict(), tmp_path / "w.safetensors")
    settings = [f"weights={tmp_path / 'w.safetensors'}", "head_epochs=0.25", "epochs=2"]
    kind, config = recipes.load("digits", settings)
    task = kind(config, torch.device("cpu"))
    trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
    start = {name: value.detach().clone() for name, value in task.network.named_parameters()}
    proxies = task.loss.loss.proxies.detach().clone()
    held = math.ceil(0.25 * task.steps_per_epoch)
    for step in range(held + 1):
        trainer._train_step(task.network)
        moved = {n for n, value in task.network.named_parameters() if not torch.equal(value, start[n])}
        assert {name.split(".")[0] for name in moved} == (
            {"embedding", "backbone"} if step == held else {"embedding"}
        )
        assert not torch.equal(task.loss.loss.proxies, proxies)


def test_fixed_norms_do_not_learn(tmp_path):
    save_file(model.tiny().state_dict(), tmp_path / "w.safetensors")
    settings = [f"weights={tmp_path / 'w.safetensors'}", "batch_norm=fixed", "head_epochs=0"]
    kind, config = recipes.load("digits", settings)
    task = kind(config, torch.device("cpu"))
    trainer = Trainer(task, config, tmp_path, torch.device("cpu"))
    before = {name: value.clone() for name, value in task.network.state_dict().items()}
    trainer._train_step(task.network)
    after = task.network.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    norms = {
        f"backbone.{at}" for at, module in enumerate(task.network.backbone) if "Norm" in type(module).__name__
    }
    assert {name.rpartition(".")[0] for name in same} == norms and len(norms) == 3


# ------------------------------------------------------------------------------- runs of an older version


def old(settings):
    """Settings as an older version saved them."""
    for section, keys in (("model", ("pooling", "norm")), ("view", ("mean", "std", "test_crop"))):
        for key in keys:
            del settings[section][key]
    del settings["head_epochs"]
    return settings


def test_checkpoints_of_an_older_version(tmp_path):
    """Their networks are built as they were; training cannot go on, and says so."""
    root = images.folder_set(tmp_path / "data")
    overrides = [f"data.root={root}", "backbone=resnet18", "weights=none", "view.resize=36", "view.crop=32"]
    _, config = recipes.load("folder", overrides)
    saved = old(config.model_dump(mode="json"))
    found = Config.upgraded(saved)
    assert (found["model"]["pooling"], found["model"]["norm"]) == ("own", "none")
    assert (found["view"]["mean"], found["view"]["std"]) == (list(MEAN), list(STD))
    assert found["view"]["test_crop"] == 32  # all images were of one size
    assert recipes.checked(saved, [], saved=True)[1].model.pooling == "own"
    assert recipes.checked(saved, [])[1].model.pooling == "auto"  # a recipe that does not say
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(recipes.yaml.safe_dump(saved))
    with pytest.raises(UserError, match=r"^--resume: .*run was started by an older version of rankgrad"):
        run.run("folder", overrides, out=str(tmp_path / "run"), resume=True)


def test_settings_are_saved_complete(tmp_path):
    root = images.folder_set(tmp_path / "data")
    overrides = [f"data.root={root}", "backbone=tiny", "weights=none", "view.crop=14", "epochs=1", "embedding=4"]
    folder, _ = run.run("folder", [*overrides, "precision=fp32", "device=cpu"], out=str(tmp_path / "run"))
    view = recipes.load(str(folder))[1].view
    assert (view.crop, view.resize, view.mean) == (14, 16, MEAN)
    assert len(rows(folder, "evaluations")) == 2  # before training, and after it
    again, _ = run.run("folder", [*overrides, "precision=fp32", "device=cpu"], out=str(folder), resume=True)
    assert again == folder
