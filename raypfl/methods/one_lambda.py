"""The one-lambda study in DiversiFed's introduction (its Eq. 1): one weight pulls or pushes everybody.

    L_i = F_i(w_i) + lam mean_{j != i} ||w_i - w_j||          (or the squared distance)

lam > 0 pulls all clients together, lam < 0 pushes them apart, lam = 0 is Separate. The others' models are
held at their values of the round's start; every participant downloads all of them.
"""

# S participants, k clients of a batch, K clients of a cohort, P parameters.

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from raypfl.algebra import rows_of
from raypfl.config import StrictModel
from raypfl.methods.contract import SERVER, Message, Plan
from raypfl.methods.published import Hub, Published, State, Up
from raypfl.training import Batch, Cohort, Network, Rows, cross_entropy

MAX_SQUARED = 0.1
"""Beyond this |lam|, pushing by squared distances is an exponential run-away."""


class Down(NamedTuple):
    """To a participant."""

    models: Tensor
    """All participants' models, the same for everyone, `[1, S, P]`."""
    place: Tensor
    """Which of them is the client's own, int64 `[S, 1]`; known to it, not sent."""


class Config(StrictModel):
    """Options of the study; the paper's grid of lambda is lost."""

    name: Literal["one_lambda"] = "one_lambda"
    lam: float = Field(
        0.0, ge=-10.0, le=10.0, description="lambda: above 0 pulls together, below 0 pushes apart"
    )
    distance: Literal["plain", "squared"] = Field("plain", description="Euclidean distance or its square")

    @model_validator(mode="after")
    def _squared_is_small(self) -> Config:
        if self.distance == "squared" and abs(self.lam) > MAX_SQUARED:
            raise ValueError(f"lam = {self.lam} with squared distances runs away; use |lam| <= {MAX_SQUARED}")
        return self


class OneLambda(Published[Config, Down]):
    """Separate with one attraction or repulsion between all clients."""

    Config = Config
    shared = frozenset({"models"})
    columns = frozenset({"w", "models"})
    summary = "one-lambda study: all clients attract or all repel each other"

    def download(self, net: Network, hub: Hub, plan: Plan) -> Down:
        place = torch.arange(len(plan.ids), device=hub.w.device)
        return Down(rows_of(hub.w, plan.ids)[None], place[:, None])

    def local_update(self, cohort: Cohort, state: State, down: Down) -> tuple[State, Up]:
        # With lam = 0 the term is left out, so that the run is bitwise Separate.
        extra = (down.models, down.place) if self.config.lam != 0.0 and down.models.shape[1] > 1 else ()
        w = cohort.fit(state.w, self._objective, *extra).w
        return State(w), Up(w[:, cohort.net.weights].clone())

    def _objective(self, m: Rows, batch: Batch, *others: Tensor) -> Tensor:
        loss = cross_entropy(m, batch)
        if not others:
            return loss
        models, place = others
        squared_kS = (m.w[:, None] - models).square().sum(2)
        mine_kS = torch.arange(models.shape[1], device=place.device) == place
        # The distance has no gradient at zero; coincident models exert no force.
        still_kS = mine_kS | (squared_kS == 0)
        measure_kS = squared_kS.masked_fill(still_kS, 1.0)
        if self.config.distance == "plain":
            measure_kS = measure_kS.sqrt()
        return loss + self.config.lam * measure_kS.masked_fill(still_kS, 0.0).sum(1) / (models.shape[1] - 1)

    def sent_down(self, net: Network, plan: Plan, down: Down) -> list[Message]:
        values = (len(plan.ids) - 1) * net.num_weights
        size = values * down.models.element_size()
        return [Message(SERVER, client, "models", values, size) for client in plan.ids.tolist() if values]
