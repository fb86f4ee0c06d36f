"""What can be set: an experiment, as a person writes it, and a run, which is one method with one seed.

Options of methods, data sets, partitions, models and local training live beside their owners; here is
what belongs to none of them, and the checks that need more than one key.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field, PositiveInt, field_validator, model_validator

from raypfl import plugins
from raypfl.clock import VirtualClock
from raypfl.clock.config import Given
from raypfl.config import StrictModel
from raypfl.data import DataConfig, PartitionConfig
from raypfl.engine.faults import FaultsConfig
from raypfl.errors import ConfigError
from raypfl.methods import METHODS
from raypfl.methods.contract import Model, Point
from raypfl.models import ModelConfig
from raypfl.records.storage import Remote, is_remote
from raypfl.topology import TopologyConfig
from raypfl.training.config import TrainingConfig
from raypfl.watch.config import WatchConfig

if TYPE_CHECKING:

    class MethodConfig(StrictModel):
        """The options of one method: in truth the union of the methods' own models."""

        name: str

else:
    # What other packages add stands beside what comes with the project.
    MethodConfig = plugins.union_with(
        Annotated[
            Union[tuple(method.Config for method in METHODS.values())],  # noqa: UP007
            Field(discriminator="name"),
        ],
        plugins.METHOD_GROUP,
    )
    DataConfig = plugins.union_with(DataConfig, plugins.DATA_GROUP)
    PartitionConfig = plugins.union_with(PartitionConfig, plugins.PARTITION_GROUP)
    ModelConfig = plugins.union_with(ModelConfig, plugins.MODEL_GROUP)

OF_PEERS = ("mode", "order", "timeout", "offset", "period")
OF_SERVERS = ("deadline", "over_selection")
"""Options of the clock that only methods without, and with, a server have a use for."""

Seed = Annotated[int, Field(ge=0)]


class ParticipationConfig(StrictModel):
    """How many clients take part in a round; exactly one of the two is given."""

    fraction: float | None = Field(None, gt=0.0, le=1.0, description="share of all clients, rounded down")
    count: PositiveInt | None = Field(None, description="number of clients")

    @model_validator(mode="after")
    def _exactly_one(self) -> ParticipationConfig:
        if (self.fraction is None) == (self.count is None):
            raise ValueError("give exactly one of fraction and count (null unsets the other).")
        return self

    def participants(self, num_clients: int) -> int:
        """The number of clients a round.

        Raises:
            ConfigError: the fraction selects nobody, or the count is larger than `num_clients`.
        """
        if self.count is not None:
            if self.count > num_clients:
                raise ConfigError(
                    f"participation.count = {self.count} is more than the {num_clients} clients there are. "
                    f"Use a count of at most {num_clients}."
                )
            return self.count
        assert self.fraction is not None
        # 0.29 * 100 is 28.999999999999996 in binary, and means 29.
        participants = math.floor(self.fraction * num_clients + 1e-9)
        if participants == 0:
            raise ConfigError(
                f"participation.fraction = {self.fraction:g} of {num_clients} clients selects 0 "
                f"participants. Use a fraction of at least {math.ceil(1e6 / num_clients) / 1e6:g}, "
                "or set participation.count."
            )
        return participants


class EvaluationConfig(StrictModel):
    """When, where and on whom models are evaluated."""

    every: PositiveInt = Field(1, description="rounds between evaluations; the last round always is")
    points: tuple[Point, ...] = Field(
        ("pre", "post"), min_length=1, description="pre: as received; post: after local training"
    )
    models: tuple[Model, ...] = Field(
        ("personalised", "global", "alternative"), min_length=1, description="those a method has"
    )
    diagnostics: bool = Field(
        False, description="record what the method says of the server's step, and matrices between clients"
    )
    clients: PositiveInt | Literal["all"] = Field("all", description="a sample of so many clients, or all")

    @field_validator("points", "models")
    @classmethod
    def _no_repetition(cls, chosen: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(chosen)) < len(chosen):
            raise ValueError("must not name anything twice")
        return chosen


class EngineConfig(StrictModel):
    """Where clients and the server live. No setting here changes a result, except where it says so."""

    name: Literal["local", "ray"] = Field("local", description="this process, or Ray actors")
    num_actors: PositiveInt | None = Field(None, description="client hosts; null: one per core or GPU share")
    clients_per_actor: PositiveInt | None = Field(
        None,
        description="instead of num_actors; below the block size it makes blocks smaller (moves last bits)",
    )
    block: PositiveInt | Literal["auto"] = Field(
        "auto", description="clients dealt and messaged together (moves last bits)"
    )
    width: PositiveInt | Literal["auto"] = Field("auto", description="models per forward (moves last bits)")
    threads: PositiveInt = Field(1, description="torch threads per process (moves last bits)")
    address: str | None = Field(None, description="the Ray cluster; null: one on this machine")

    @model_validator(mode="after")
    def _one_way_to_count_actors(self) -> EngineConfig:
        if self.num_actors is not None and self.clients_per_actor is not None:
            raise ValueError("give at most one of num_actors and clients_per_actor (null unsets the other).")
        return self


class ResourcesConfig(StrictModel):
    """What each Ray actor asks for, in Ray's words, and the device that models run on."""

    num_cpus_per_actor: float = Field(1, ge=0)
    num_gpus_per_actor: float = Field(0.0, ge=0)
    num_cpus_server: float = Field(0, ge=0)
    num_gpus_server: float = Field(0.0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    hosts: Literal["any", "pack", "spread"] = Field(
        "any", description="on few nodes, or on as many as have room; any: as Ray finds room"
    )
    server: Literal["any", "beside", "apart"] = Field(
        "any", description="on a node with client hosts, or on one without any"
    )

    @field_validator("num_gpus_per_actor", "num_gpus_server")
    @classmethod
    def _whole_above_one(cls, share: float) -> float:
        if share > 1 and not float(share).is_integer():
            raise ValueError("must be a fraction of one GPU (at most 1) or a whole number of GPUs")
        return share

    @model_validator(mode="after")
    def _no_gpus_for_the_cpu(self) -> ResourcesConfig:
        if self.device == "cpu" and (self.num_gpus_per_actor or self.num_gpus_server):
            raise ValueError("device cpu leaves the GPUs that are asked for idle; use device auto.")
        return self


class ServerConfig(StrictModel):
    """How the server's state is held and worked on. No setting here changes a result."""

    sharding: PositiveInt = Field(
        1,
        description="servers that hold the columns of all rows together, where one cannot; "
        "for methods whose server works column by column",
    )
    threads: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="pieces of its distances and mixing at once, each on engine.threads; auto: on the "
        "processor that client hosts leave idle meanwhile, as many as they have",
    )


class CheckpointConfig(StrictModel):
    """How often the state of a run is written, and how much of it is kept."""

    every: int = Field(10, ge=0, description="rounds; 0: only at the end and on interruption")
    keep: PositiveInt = Field(2, description="how many of the last checkpoints stay")


class Settings(StrictModel):
    """What an experiment and each of its runs have in common."""

    name: str | None = Field(None, description="the run's folder below storage_path; null: method-data-time")
    storage_path: str = Field(
        "runs", description="the folder of runs, or its address: s3://bucket/runs, gs://..., hdfs://..."
    )
    rounds: PositiveInt
    data: DataConfig
    partition: PartitionConfig
    model: ModelConfig
    personal_model: tuple[ModelConfig, ...] = Field(
        (), description="of models that clients keep: client i has entry i mod their number; none: like model"
    )
    training: TrainingConfig = TrainingConfig()
    participation: ParticipationConfig = ParticipationConfig(fraction=1.0)
    topology: TopologyConfig | None = Field(
        None, description="who hears whom, for methods without a server; null: what each method's paper has"
    )
    clock: VirtualClock | None = Field(
        None, description="virtual time: stragglers, links, dead-lines, peers at their own pace; null: none"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    resources: ResourcesConfig = ResourcesConfig()
    server: ServerConfig = ServerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: tuple[WatchConfig, ...] = Field(
        (),
        description="who else is told figures: tensorboard, mlflow, wandb; names, or mappings with options",
    )
    faults: FaultsConfig = FaultsConfig()

    @field_validator("storage_path", mode="before")
    @classmethod
    def _a_path(cls, given: object) -> str:
        if not isinstance(given, str | os.PathLike):
            raise ValueError("must be a path")
        return os.fspath(given)

    @field_validator("storage_path")
    @classmethod
    def _an_address(cls, path: str) -> str:
        if is_remote(path):
            # Says what is wrong with it, such as a password.
            Remote(path)
        elif (kind := re.match(r"(s3|gs|gcs|hdfs|abfs|file):(?!//)", path)) is not None:
            raise ValueError(f"is no address; write {kind[1]}://, as in {kind[1]}://bucket/runs")
        return path

    @field_validator("name")
    @classmethod
    def _a_folder_below(cls, name: str | None) -> str | None:
        if name is not None and (not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts):
            raise ValueError("must be a folder below storage_path")
        return name

    @field_validator("watch", mode="before")
    @classmethod
    def _names_alone(cls, given: object) -> object:
        several = given if isinstance(given, list | tuple) else () if given is None else (given,)
        return tuple({"name": one} if isinstance(one, str) else one for one in several)

    @field_validator("watch")
    @classmethod
    def _each_once(cls, watch: tuple[WatchConfig, ...]) -> tuple[WatchConfig, ...]:
        names = [one.name for one in watch]
        if len(set(names)) < len(names):
            raise ValueError("must not name anything twice")
        return watch

    @field_validator("personal_model", mode="before")
    @classmethod
    def _one_or_several(cls, given: object) -> object:
        if given is None:
            return ()
        return given if isinstance(given, list | tuple) else (given,)

    @model_validator(mode="after")
    def _gpus_for_cuda(self) -> Settings:
        asked = self.resources.device == "cuda" and self.engine.name == "ray"
        if asked and not self.resources.num_gpus_per_actor:
            raise ConfigError(
                "resources.device = cuda with resources.num_gpus_per_actor = 0: on Ray, actors see only the "
                "GPUs they ask for. Set resources.num_gpus_per_actor, for instance 0.25 for four hosts a GPU."
            )
        return self

    @model_validator(mode="after")
    def _faults_that_can_be_answered(self) -> Settings:
        if self.faults.deadline is not None and self.engine.name == "local":
            raise ConfigError(
                f"faults.deadline = {self.faults.deadline:g} with engine.name = local: clients that hang in "
                "this very process cannot be ended. Use engine.name=ray, or faults.deadline=null."
            )
        if self.faults.policy == "drop_clients" and self.clock is not None and self.clock.mode == "async":
            raise ConfigError(
                "faults.policy = drop_clients with clock.mode = async: there is no round that a client could "
                "be left out of. Use restart or fail."
            )
        return self

    @model_validator(mode="after")
    def _one_server_to_place(self) -> Settings:
        if self.server.sharding > 1 and self.resources.server != "any":
            raise ConfigError(
                f"resources.server = {self.resources.server} places one server, and server.sharding = "
                f"{self.server.sharding} makes several. Leave resources.server out."
            )
        return self

    @model_validator(mode="after")
    def _enough_clients(self) -> Settings:
        num_clients = self.partition.num_clients
        self.participation.participants(num_clients)
        wanted = {
            "evaluation.clients": self.evaluation.clients,
            "engine.num_actors": self.engine.num_actors,
        }
        for key, count in wanted.items():
            if isinstance(count, int) and count > num_clients:
                raise ConfigError(
                    f"{key} = {count} is more than the {num_clients} clients there are. "
                    f"Use at most {num_clients}."
                )
        return self


class ExperimentConfig(Settings):
    """An experiment: each method with each seed is one run."""

    method: tuple[MethodConfig, ...] = Field(min_length=1)
    seed: tuple[Seed, ...] = Field((0,), min_length=1)

    @model_validator(mode="after")
    def _no_run_twice(self) -> ExperimentConfig:
        if len(set(self.seed)) < len(self.seed):
            raise ValueError(f"seed = {list(self.seed)} names a seed twice.")
        _check_personal_model(self, self.method)
        _check_clock(self, self.method)
        _check_sharding(self, self.method)
        for index, method in enumerate(self.method):
            if method in self.method[:index]:
                raise ValueError(f"method lists {method.name} twice with the same options.")
        return self


class RunConfig(Settings):
    """One method with one seed: what is saved with a run, and can be run again as it stands."""

    method: MethodConfig
    seed: Seed

    @model_validator(mode="after")
    def _room_for_personal_model(self) -> RunConfig:
        _check_personal_model(self, [self.method])
        _check_clock(self, [self.method])
        _check_sharding(self, [self.method])
        return self


def _check_personal_model(settings: Settings, methods: Iterable[MethodConfig]) -> None:
    for method in methods if settings.personal_model else ():
        if not METHODS[method.name].personal_models:
            able = [name for name, found in METHODS.items() if found.personal_models]
            raise ConfigError(
                f"personal_model: with method {method.name} clients have no models of another architecture; "
                f"they do with {', '.join(able)}. Remove personal_model, or run {method.name} without it."
            )


def _check_sharding(settings: Settings, methods: Iterable[MethodConfig]) -> None:
    asked = f"server.sharding = {settings.server.sharding}"
    for method in methods if settings.server.sharding > 1 else ():
        if not METHODS[method.name].columns:
            able = [name for name, known in METHODS.items() if known.columns]
            raise ConfigError(
                f"{asked}: the server of {method.name} does not work column by column; those of "
                f"{', '.join(able)} do. Remove it, or run {method.name} apart."
            )
    if settings.server.sharding > 1 and settings.clock is not None:
        raise ConfigError(f"{asked} with clock: a virtual clock knows one server. Remove one of the two.")


def _check_clock(settings: Settings, methods: Iterable[MethodConfig]) -> None:
    clock = settings.clock
    if clock is None:
        return
    num_clients = settings.partition.num_clients
    for name, quantity in clock.quantities.items():
        if isinstance(quantity, Given) and len(quantity.values) != num_clients:
            raise ConfigError(
                f"clock.{name}.values has {len(quantity.values)} values for {num_clients} clients. "
                "Give one for each."
            )
    defaults = VirtualClock()
    for options, belong, without_server in ((OF_PEERS, "without", True), (OF_SERVERS, "with", False)):
        used = [option for option in options if getattr(clock, option) != getattr(defaults, option)]
        others = [method.name for method in methods if METHODS[method.name].without_server != without_server]
        if used and others:
            able = [name for name, known in METHODS.items() if known.without_server == without_server]
            raise ConfigError(
                f"clock.{used[0]} = {getattr(clock, used[0])}: is for methods {belong} a server "
                f"({', '.join(able)}), not for {', '.join(others)}. Leave it out, or run them apart."
            )
