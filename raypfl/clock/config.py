"""The options of virtual time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raypfl.config import StrictModel

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]


class LogNormal(StrictModel):
    """`median * exp(sigma * z)`, z standard normal, one draw a client."""

    name: Literal["lognormal"]
    median: Annotated[float, Field(gt=0)]
    sigma: Amount = 0.5


class TwoValues(StrictModel):
    """`other` for a share of the clients, drawn client by client, and `value` for the rest."""

    name: Literal["two"]
    value: Amount
    other: Amount
    share: Share


class Given(StrictModel):
    """A value for each client."""

    name: Literal["given"]
    values: tuple[Amount, ...] = Field(min_length=1)


Law = Annotated[LogNormal | TwoValues | Given, Field(discriminator="name")]


class VirtualClock(StrictModel):
    """How fast clients and their links are, and what a round does about those who are slow.

    A quantity is a number, the same for all clients, or a law: `{name: lognormal, median, sigma}`,
    `{name: two, value, other, share}` or `{name: given, values: [...]}`. Times are virtual seconds.
    """

    mode: Literal["barrier", "async"] = Field(
        "barrier", description="rounds that all end together, or (without a server) everyone at its own pace"
    )
    order: Literal["jacobi", "gs_index", "gs_random"] = Field(
        "jacobi",
        description="peers of a round hear models of its start (jacobi), or train one after another and hear "
        "the newest (Gauss-Seidel): by number (code of UA-PDFL) or in a new random order every round",
    )
    compute: Amount | Law = Field(1.0, description="seconds of local training a `unit`, of each client")
    unit: Literal["epoch", "sample"] = Field(
        "epoch", description="what `compute` is for: a pass over a client's samples, or one of them"
    )
    latency: Amount | Law = Field(0.0, description="seconds that a client adds to every message on its link")
    bandwidth: Annotated[float, Field(gt=0)] | Law | None = Field(
        None, description="bytes a second of each client's link; null: messages take no time but latency"
    )
    drop_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="probability that a client fails in a round: it gets a server's message and sends none; "
        "between peers it neither answers nor asks",
    )
    deadline: Annotated[float, Field(gt=0)] | None = Field(
        None, description="seconds a server waits for uploads; later ones are thrown away"
    )
    over_selection: Annotated[float, Field(ge=1)] = Field(
        1.0, description="selected clients a wanted one; a server takes those that come first"
    )
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="seconds a peer waits for an answer; null: it knows at once who has failed, and waits "
        "for all others",
    )
    offset: Amount | Law = Field(0.0, description="when each peer begins its first iteration (async)")
    period: Amount = Field(0.0, description="least seconds from one of its beginnings to the next (async)")

    @model_validator(mode="after")
    def _mode_and_order(self) -> VirtualClock:
        if self.mode == "async" and self.order != "jacobi":
            raise ValueError(
                f"order = {self.order} is about the peers of one round, and mode = async has none that begin "
                "together. Use mode barrier, or leave order out."
            )
        if self.mode == "barrier" and (self.period or self.offset != 0):
            raise ValueError("offset and period are for mode = async; leave them out with mode barrier.")
        return self

    @model_validator(mode="after")
    def _links_have_a_bandwidth(self) -> VirtualClock:
        law = self.bandwidth
        none = isinstance(law, TwoValues) and (law.value == 0 or law.other == 0)
        if none or (isinstance(law, Given) and 0 in law.values):
            raise ValueError("bandwidth: every client needs more than 0 bytes a second")
        return self

    @property
    def quantities(self) -> dict[str, float | Law]:
        """The options that may differ from client to client."""
        named = {name: getattr(self, name) for name in ("compute", "latency", "bandwidth", "offset")}
        return {name: value for name, value in named.items() if value is not None}
