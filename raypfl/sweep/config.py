"""What a sweep is: a base configuration, a space around it, and how its trials are scheduled and chosen."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, PositiveInt, field_validator, model_validator

from raypfl.config import StrictModel

KINDS = ("grid", "choice", "uniform", "log_uniform", "integer")

Number = int | float


class Dimension(StrictModel):
    """The values of one key, or of keys that change together; exactly one of the five kinds is given."""

    grid: tuple[JsonValue, ...] | None = Field(None, min_length=1, description="every value")
    choice: tuple[JsonValue, ...] | None = Field(None, min_length=1, description="one of these, drawn")
    uniform: tuple[float, float] | None = Field(None, description="drawn between two numbers")
    log_uniform: tuple[float, float] | None = Field(None, description="the same for the logarithm")
    integer: tuple[int, int] | None = Field(None, description="a whole number, both ends included")
    when: str | None = Field(None, description="a condition on earlier keys; else the key is left out")

    @model_validator(mode="after")
    def _one_kind(self) -> Dimension:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(KINDS)}.")
        return self

    @field_validator("grid", "choice")
    @classmethod
    def _no_repetition(cls, values: tuple[JsonValue, ...] | None) -> tuple[JsonValue, ...] | None:
        for position, value in enumerate(values or ()):
            # True == 1 and 1.0 == 1, and no configuration tells the latter two apart.
            if any(value == other and type(value) is type(other) for other in (values or ())[:position]):
                raise ValueError(f"must not name {value} twice")
        return values

    @field_validator("uniform", "log_uniform", "integer")
    @classmethod
    def _ascending(cls, ends: tuple[Number, Number] | None) -> tuple[Number, Number] | None:
        if ends is not None and not ends[0] < ends[1]:
            raise ValueError(f"must ascend, and {ends[0]:g} is not below {ends[1]:g}")
        return ends

    @field_validator("log_uniform")
    @classmethod
    def _positive(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and ends[0] <= 0:
            raise ValueError("must be positive")
        return ends

    @property
    def is_grid(self) -> bool:
        """Whether every value is taken; else values are drawn."""
        return self.grid is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Ends of a drawn number."""
        ends = self.uniform or self.log_uniform or self.integer
        assert ends is not None
        return ends

    def at(self, share: float) -> JsonValue:
        """The value at a share in [0, 1) of what can be drawn."""
        if self.choice is not None:
            return self.choice[int(share * len(self.choice))]
        low, high = self.bounds
        if self.integer is not None:
            return int(low) + int(share * (high - low + 1))
        if self.log_uniform is not None:
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        return low + share * (high - low)


class Listed(StrictModel):
    """Every combination of grids; keys that are drawn get `draws` values for each combination."""

    name: Literal["listed"] = "listed"
    draws: PositiveInt | None = Field(None, description="points for each combination of the grids")
    seed: int = Field(0, ge=0, description="of the draws")


class Optuna(StrictModel):
    """Points that Optuna proposes from the scores of earlier ones (needs the extra `raypfl[optuna]`)."""

    name: Literal["optuna"] = "optuna"
    points: PositiveInt = Field(description="how many it proposes; each is run with every seed")
    seed: int = Field(0, ge=0, description="of the proposals; they also depend on the order of results")
    startup: PositiveInt = Field(10, description="points that are drawn before any is proposed")


Search = Annotated[Listed | Optuna, Field(discriminator="name")]


class ToTheEnd(StrictModel):
    """Every trial runs to its last round."""

    name: Literal["none"] = "none"


class Asha(StrictModel):
    """Asynchronous successive halving: at rounds grace, grace * reduction, ... only the best go on."""

    name: Literal["asha"] = "asha"
    grace: PositiveInt = Field(description="rounds that every trial gets")
    reduction: float = Field(3.0, gt=1.0, description="one of so many goes on")


class Median(StrictModel):
    """Stops a trial whose best score is below the median of the others' means at the same round."""

    name: Literal["median"] = "median"
    grace: PositiveInt = Field(description="rounds that every trial gets")
    min_trials: PositiveInt = Field(3, description="so many others are needed for a median")


class Pbt(StrictModel):
    """Population based training: the worst go on from the models of the best, with changed keys.

    Every key of the space is drawn, and changes in a run; Tune multiplies it by 1.2 or 0.8, or draws again.
    """

    name: Literal["pbt"] = "pbt"
    interval: PositiveInt = Field(description="rounds between exchanges")
    quantile: float = Field(0.25, gt=0.0, le=0.5, description="share of the best, and of the worst")
    resample: float = Field(0.25, ge=0.0, le=1.0, description="chance that a key is drawn again")


Scheduler = Annotated[ToTheEnd | Asha | Median | Pbt, Field(discriminator="name")]


class Select(StrictModel):
    """How the best point is chosen: by the mean over its seeds of a run's score."""

    on: Literal["auto", "validation", "test"] = Field(
        "auto", description="auto: validation where there is such a split, else test, as the papers do"
    )
    view: str | None = Field(None, description="model/point, e.g. global/pre; null: what the method reports")
    average: Literal["mean", "weighted"] = Field("mean", description="over clients: uniform, or by samples")
    per: tuple[str, ...] = Field((), description="a best point for each combination of these keys")

    @field_validator("view")
    @classmethod
    def _model_and_point(cls, view: str | None) -> str | None:
        models, points = ("personalised", "global", "alternative"), ("pre", "post")
        if view is not None and view not in [f"{model}/{point}" for model in models for point in points]:
            raise ValueError("must be model/point, such as personalised/post or global/pre")
        return view


class TrialConfig(StrictModel):
    """What a trial with the local engine asks of Ray; one with the Ray engine asks for its actors."""

    cpus: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="below 1: several trials a core; null: engine.threads"
    )
    gpus: float = Field(0.0, ge=0.0, description="below 1: several trials a GPU")


class SweepConfig(StrictModel):
    """A sweep: `base` with `set`, and around it `space`."""

    name: str | None = Field(None, description="the folder below storage_path; null: the file's name")
    storage_path: str = "./runs"
    base: dict[str, Any] | str = Field(description="a configuration: a file beside this one, or its keys")
    set: dict[str, Any] = Field({}, description="dotted keys of the base that every trial has")
    space: dict[str, Dimension] = Field(description="dotted keys, and what they may be")
    constraints: tuple[str, ...] = Field((), description="conditions on keys that every trial meets")
    search: Search = Listed()
    scheduler: Scheduler = ToTheEnd()
    select: Select = Select()
    trial: TrialConfig = TrialConfig()
    concurrency: PositiveInt | None = Field(None, description="trials at once; null: as many as fit")

    @field_validator("space", mode="before")
    @classmethod
    def _a_list_is_a_grid(cls, space: object) -> object:
        if not isinstance(space, dict):
            return space
        return {
            str(key): {"grid": values} if isinstance(values, list | tuple) else values
            for key, values in space.items()
        }

    @model_validator(mode="after")
    def _keys_that_change_together(self) -> SweepConfig:
        for key, dimension in self.space.items():
            keys = keys_of(key)
            if len(keys) == 1:
                continue
            values = dimension.grid or dimension.choice
            if values is None or any(not isinstance(v, list) or len(v) != len(keys) for v in values):
                raise ValueError(
                    f"space.{key} = {len(keys)} keys that change together: give a grid or choice of lists of "
                    f"{len(keys)} values, such as [[1, 2], [3, 4]]."
                )
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """Every dotted key of the space, in its order."""
        return tuple(key for keys in self.space for key in keys_of(keys))


def keys_of(name: str) -> tuple[str, ...]:
    """The keys under one name of the space: one, or several with commas between them."""
    return tuple(key.strip() for key in name.split(","))
