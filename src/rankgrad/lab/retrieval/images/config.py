"""Settings of a retrieval run on images."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rankgrad.lab.retrieval.config import SCRATCH_LR, RetrievalConfig
from rankgrad.lab.training.config import Positive, Section, Side, Width, section_of
from rankgrad.lab.vision.config import ImageData
from rankgrad.lab.vision.images import MEAN, STD

#: What ``auto`` means for a pretrained network, and for one from scratch (weights=none).
AUTO_LR, AUTO_EPOCHS, AUTO_SCALE = (3e-5, SCRATCH_LR), (15, 90), (0.2, 0.6)
#: Which rates ``lr=auto`` tries for a pretrained network, where there are images enough to compare them.
AUTO_RATES = (1e-5, 3e-5, 1e-4, 3e-4)
Fraction = Annotated[float, Field(gt=0, le=1)]
Channels = tuple[float, float, float]


class Data(ImageData):
    """Which images, and how they are read."""

    name: Literal["digits", "folder", "cub", "sop", "inshop"]  # the data set, see `rankgrad ls`
    test_share: Fraction = 0.5  # folder: share of the classes to test on; 1 to evaluate on all
    split_seed: Annotated[int, Field(ge=0)] = 0  # folder: seed of the choice of test classes
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0  # test on this share of the *training* classes instead


class View(Section):
    """From a decoded image to the input of the network. What is left out is as the backbone was trained."""

    resize: Side | None = None  # pixels of the short side, or of both; not set: 256, from scratch 256 at most
    shape: Literal["short", "square"] = "short"  # short: resize the short side; square: both sides
    crop: Side | None = None  # side of the square that the network receives; not set: 224, or the backbone's own
    test_crop: Side | None = None  # the same at test time; not set: larger if pretrained and crop is 128 or more
    mean: Channels | None = None  # mean of each channel that is subtracted, in [0, 1]; not set: the backbone's
    std: Channels | None = None  # standard deviation of each channel; not set: the backbone's
    augment: Literal["resized_crop", "crop", "none"] = "resized_crop"  # augmentation of training images
    scale: Fraction | None = None  # resized_crop: the smallest share of the area; not set: 0.2, from scratch 0.6
    flip: bool | None = None  # whether half of the training images are mirrored; not set: unless they are drawings


class Model(Section):
    """The network: backbone, pooling, norm, linear embedding."""

    backbone: str = "resnet50"  # a network of torchvision or timm; torchvision:NAME and timm:NAME say which
    weights: str = "library"  # library (download), none, or a safetensors file
    embedding: Width = 512  # length of an embedding
    pooling: Literal["auto", "avg", "max", "avg+max", "gem", "own"] = "auto"  # auto: avg+max, else own
    norm: Literal["layer", "none"] = "layer"  # norm of the features before the embedding layer
    batch_norm: Literal["frozen", "fixed", "train"] = "fixed"  # frozen: scale and shift learn; fixed: nothing


class Config(RetrievalConfig):
    """All settings of a retrieval run on images."""

    task: Literal["retrieval"]
    data: Data
    view: View = View()
    model: Model = Model()
    rates: tuple[Positive, ...] = ()  # learning rates to try on held-out training classes first; see lr

    def with_rate(self, rate: float) -> Config:
        """These settings with a learning rate, and none to try."""
        return self.model_copy(update={"optim": self.optim.model_copy(update={"lr": rate}), "rates": ()})

    @classmethod
    def upgraded(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Before 0.2 networks kept their own pooling, and saw images normalised as ImageNet's, all of one size."""
        model, view = settings.get("model"), settings.get("view")
        if not isinstance(model, dict) or not isinstance(view, dict) or "test_crop" in view:
            return settings
        view = {**view, "test_crop": view.get("crop")}
        if "pooling" not in model:
            model = {**model, "pooling": "own", "norm": "none"}
            view |= {"mean": list(MEAN), "std": list(STD)}
        return {**settings, "model": model, "view": view}

    @model_validator(mode="before")
    @classmethod
    def _by_weights(cls, settings: Any) -> Any:
        """Learning rates and epochs that are ``auto``: they follow from what the network starts from."""
        if not isinstance(settings, dict):
            return settings
        model, optim, data = (section_of(settings, name) for name in ("model", "optim", "data"))
        scratch = model.get("weights") == "none"
        if settings.get("epochs") == "auto":
            settings = {**settings, "epochs": AUTO_EPOCHS[scratch]}
        if optim.get("lr") == "auto":
            rates = () if scratch or data.get("hold_out") else AUTO_RATES
            settings = {"rates": rates, **settings, "optim": {**optim, "lr": AUTO_LR[scratch]}}
        return settings

    @model_validator(mode="after")
    def _crops_fit(self) -> Config:
        if self.view.crop and self.view.resize and self.view.crop > self.view.resize:
            raise ValueError(f"view.crop = {self.view.crop} must not exceed view.resize = {self.view.resize}")
        return self

    @model_validator(mode="after")
    def _rates_are_judged(self) -> Config:
        if len(set(self.rates)) < len(self.rates):
            raise ValueError(f"rates = {list(self.rates)}: expected each rate once")
        if self.rates and self.data.hold_out:
            raise ValueError(
                f"data.hold_out = {self.data.hold_out:g} and rates = {list(self.rates)} exclude each other: rates "
                "are judged on held-out classes"
            )
        return self
