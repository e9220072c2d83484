"""A trained ranker, to be used: from features to scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Exportable, Trained


class TrainedRanker(Trained):
    """Items to scores.

    Args:
        config: The settings of the run.
        network: With the weights of a checkpoint.
        device: Where it is.
        features: Their names, in the order of the columns.
    """

    def __init__(self, config: Any, network: nn.Module, device: torch.device, features: list[str]) -> None:
        super().__init__(config, network, device)
        self.features = features

    def score(self, features: Any) -> Tensor:
        """The scores ``[N]`` of the items ``[N, features]`` of one query, on the CPU; higher is better.

        Features come as a tensor, an array or nested lists. Only a ranker with ``scale: query`` needs the items
        of a query together; others take items of any queries.
        """
        try:
            given = torch.as_tensor(features, dtype=torch.float32, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"features: expected [N, {len(self.features)}] numbers ({error})") from None
        if given.ndim != 2 or given.shape[1] != len(self.features):
            raise UserError(f"features: expected [N, {len(self.features)}], received {list(given.shape)}")
        for row, column in (~given.isfinite()).nonzero()[:1].tolist():
            value, name = float(given[row, column]), self.features[column]
            raise UserError(f"features: expected finite numbers, received {value} (row {row}, feature {name})")
        if self.config.model.scale == "query":
            low, high = given.amin(0), given.amax(0)
            given = (given - low) / (high - low).where(high > low, 1)
        with torch.inference_mode():
            scores: Tensor = self.network(given).cpu()
        return scores

    def exportable(self) -> Exportable:
        """From features as they are in the data (``scale: query``: brought to 0 ... 1 in each query) to scores."""
        width = len(self.features)
        scaled = ", from 0 to 1 within each query" if self.config.model.scale == "query" else ""
        return Exportable(
            self.network,
            lambda rows: (torch.rand(rows, width).to(self.device),),
            {"features": f"[N, {width}] float32{scaled}"},
            ("scores", "[N] float32"),
        )
