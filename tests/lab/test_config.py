"""Settings: recipes load, overrides land where they should, every mistake is named with the nearest right word."""

import pytest

from rankgrad.lab import recipes, tasks
from rankgrad.lab.retrieval.images.config import Config
from rankgrad.lab.training.config import comments, sections_of
from rankgrad.lab.training.errors import UserError

RECIPES = ["cub", "cub-proxy", "digits", "folder", "inshop", "sop"]


def test_every_recipe_loads_and_says_how_to_run_it_and_what_to_expect():
    assert set(RECIPES) <= set(recipes.recipe_names())
    for name in recipes.recipe_names():
        recipes.load(name)
        header = "".join(line for line in recipes.recipe_text(name).splitlines() if line.startswith("#"))
        assert f"rankgrad train {name}" in header
        assert "xpect" in header


@pytest.mark.parametrize(
    ("name", "lr", "margin", "lam", "per_class", "r1"),
    [
        ("sop", 3e-6, 0.02, 4, 4, "78.6"),
        ("inshop", 1e-5, 0.05, 0.2, 8, "86.3"),
        ("cub", 5e-6, 0.02, 0.2, 4, "64.0"),
    ],
)
def test_the_benchmarks_have_the_paper_s_settings(name, lr, margin, lam, per_class, r1):
    _, config = recipes.load(name)
    arguments = config.loss.arguments()
    assert (config.optim.lr, arguments["margin"], arguments["lam"], config.batch.per_class) == (
        lr,
        margin,
        lam,
        per_class,
    )
    assert arguments["weight"] == "loglog"
    assert f"The paper reports R@1 of {r1} with a memory of three batches" in recipes.recipe_text(name)
    # not its memory, nor the embedding layer's higher rate: what it reports is no number to expect
    assert (config.target, "memory" in arguments, config.embedding_lr) == (None, False, 1)
    assert (config.batch.size, config.epochs) == (128, 80)
    assert (config.optim.milestones, config.optim.decay, config.optim.weight_decay) == ((35,), 0.3, 4e-4)


def test_the_proxies_recipe_has_the_defaults_of_their_loss():
    """They were chosen together: the defaults of the Module are what was measured."""
    _, config = recipes.load("cub-proxy")
    assert (config.loss.name, config.loss.arguments()) == ("proxy", {})


def test_one_default_everywhere():
    """The recipe on CUB is that of one's own images, and the digits have the same loss."""
    own, cub, digits = (recipes.load(name)[1] for name in ("folder", "cub-proxy", "digits"))
    same = {"data": own.data, "compile": own.compile, "rates": own.rates}  # its rate is what these choose there
    assert cub.model_copy(update=same) == own
    assert digits.loss == own.loss and not own.loss.arguments().get("memory")


def test_overrides():
    _, config = recipes.load("cub", ["lr=1e-4", "lam=4", "batch.size=64", "data.root=/x y", "milestones=[1, 2]"])
    assert (config.optim.lr, config.loss.arguments()["lam"], config.batch.size) == (1e-4, 4, 64)
    assert (config.data.root, config.optim.milestones) == ("/x y", (1, 2))
    assert config.loss.arguments()["margin"] == 0.02
    _, config = recipes.load("cub", ["loss=pml:FastAPLoss", "loss.num_bins=10", "weights=w.safetensors"])
    assert (config.loss.name, config.loss.arguments()) == ("pml:FastAPLoss", {"num_bins": 10})
    assert config.model.weights == "w.safetensors"
    _, config = recipes.load(
        "cub", ["loss=pml:TripletMarginLoss", "miner=pml:TripletMarginMiner", "miner.margin=0.2"]
    )
    assert config.miner.arguments() == {"margin": 0.2}


@pytest.mark.parametrize("name", ["optim", "optim.name"])
def test_what_is_given_with_a_name_counts_on_either_side_of_it(name):
    pairs = (["lr=0.05", "optim.momentum=0.8"], [f"{name}=sgd"]), (["loss.margin=0.3"], ["loss=ap"])
    for arguments, names in pairs:
        assert recipes.load("cub", [*arguments, *names]) == recipes.load("cub", [*names, *arguments])
    _, config = recipes.load("cub", ["lr=0.05", f"{name}=sgd", "loss.margin=0.3", "loss=ap"])
    assert (config.optim.lr, config.loss.arguments()) == (0.05, {"margin": 0.3})


def test_settings_survive_saving(tmp_path):
    _, config = recipes.load("inshop", ["lr=1.5e-7"])
    (tmp_path / "config.yaml").write_text(recipes.dump(config))
    assert recipes.load(str(tmp_path))[1] == config
    assert recipes.load(str(tmp_path / "config.yaml"))[1] == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["epohcs=3"], r"^epohcs: unknown setting, did you mean 'epochs'"),
        (["optim.learning_rate=3"], r"^optim\.learning_rate: unknown setting; there are clip, decay"),
        (["batch.pre_class=3"], r"^batch\.pre_class: unknown setting, did you mean 'per_class'"),
        (["optm.lr=3"], r"^optm\.lr: unknown section 'optm', did you mean 'optim'"),
        (["precison=fp16"], r"did you mean 'precision'"),
        (["precision=bf61"], r"^precision: unknown value 'bf61', did you mean 'bf16'"),
        (["data.name=cup"], r"^data\.name: unknown value 'cup', did you mean 'cub'"),
        (["lr=-1"], r"^optim\.lr: .*greater than 0, received -1"),
        (["batch=3"], r"^batch: expected settings of its own, as batch\.size=\.\.\., received 3$"),
        (
            ["optim=1"],
            r"^optim: expected adam or adamw or sgd or settings of its own, as optim\.lr=.*received 1$",
        ),
        (["loss=true"], r"^loss: expected a name \(rankgrad ls\), received True$"),
        (["rates=1e-4"], r"^rates: expected a list, as rates=\[\.\.\.\], received 0\.0001$"),
        (["lr=fast"], r"^optim\.lr: .*number.*received 'fast'"),
        (["epochs=2.5"], r"^epochs: .*integer.*received 2\.5"),
        (["name=x"], r"^name: several sections have it, say .*loss\.name.* or data\.name"),
        (["lr"], r"^lr: expected key=value$"),
        ([__file__], r"^.*: expected key=value; for data say --data .*test_config.py$"),
        (["batch.size=130"], r"^batch\.size = 130 must be a multiple of batch\.per_class = 4$"),
        (["view.crop=300"], r"^view\.crop = 300 must not exceed view\.resize = 256$"),
        (["recall_at=[2]"], r"^recall_at must have 1, .*; received \[2\]$"),
        (
            ["miner=pml:TripletMarginMiner"],
            r"^miner is for losses of pytorch-metric-learning \(loss=pml:\.\.\.\)$",
        ),
        (["epohcs=3", "lr=-1"], r"(?s)optim\.lr.*epohcs|epohcs.*optim\.lr"),
    ],
)
def test_mistakes_are_named(overrides, message):
    with pytest.raises(UserError, match=message):
        recipes.load("cub", overrides)


def test_unknown_recipes_and_tasks(tmp_path):
    with pytest.raises(UserError, match=r"no recipe.*'cubb', did you mean 'cub'"):
        recipes.load("cubb")
    (tmp_path / "mine.yaml").write_text("task: retreival\n")
    with pytest.raises(UserError, match=r"mine\.yaml: task: unknown value 'retreival', did you mean 'retrieval'"):
        recipes.load(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("task: retrieval\ndata: {name: digits}\n")
    with pytest.raises(UserError, match=r"mine\.yaml: loss: missing"):
        recipes.load(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("a:b", "a:b"),
        ("1.e3", 1000.0),
        ("v1.5", "v1.5"),
    ],
)
def test_values_are_read_as_people_write_them(text, value):
    assert recipes.parse("lr", text) == value
    assert type(recipes.parse("lr", text)) is type(value)


def test_sections_with_a_new_name_forget_the_old_arguments():
    _, config = recipes.load("digits", ["data=folder", "data.test_share=0.3"])
    assert (config.data.name, config.data.test_share) == ("folder", 0.3)
    assert isinstance(config, Config)


@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_every_setting_is_explained(name):
    """By the comment behind it, which `rankgrad show` prints; in a line of its own it would be lost."""
    config = tasks.task_class(name).config_class
    inner = sections_of(config)
    for section in (config, *inner.values()):
        assert set(section.model_fields) - set(inner) - set(comments(section)) == set(), section
