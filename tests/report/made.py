"""Folders of runs with numbers that were made up, as the library would have written them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raypfl.records.files import write_json, write_text
from raypfl.records.folder import RunFolder
from raypfl.records.metrics import SERVER, Metrics

CLIENTS = 4
CLASSES = 3
DATA, PARTITION = "d" * 64, "0" * 64


def made_run(
    storage: Path,
    name: str,
    *,
    method: str = "fedavg",
    seed: int = 0,
    accuracy: Sequence[Sequence[float]] = ((0.5, 0.6, 0.7, 0.8), (0.6, 0.7, 0.8, 0.9)),
    view: tuple[str, str] = ("personalised", "post"),
    config: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    partition: str | None = PARTITION,
    data: str = DATA,
    validation: Sequence[float] | None = None,
    traffic: Sequence[Mapping[str, Any]] | None = None,
    pairs: Mapping[str, np.ndarray] | None = None,
    diagnostics: Mapping[str, float] | None = None,
    clock: bool = False,
) -> Path:
    """A run's folder.

    `accuracy` is of each client in each round, from round 1, of the (model, point) `view`; `rounds` is what
    the configuration asks for, if it is more than there are; `validation` the accuracy of all clients on such
    data in each round; `traffic` the messages of every round, by default one to and one from the server for
    each client; `pairs` are matrices `[N, N]` of every round, NaN where there is no entry; with a `clock` a
    round takes ten virtual seconds.
    """
    folder = RunFolder.create(storage, name)
    model, point = view
    options = {"method": {"name": method}, "seed": seed, "rounds": rounds or len(accuracy)}
    options |= {"data": {"name": "digits"}, "partition": {"name": "dirichlet", "alpha": 0.3}}
    options |= {"clock": {"mode": "sync"}} if clock else {}
    write_text(folder.config, yaml.safe_dump(options | dict(config or {})))
    if partition is not None:
        write_json(folder.environment, {"data": data, "partition": partition, "packages": {"torch": "2.9"}})
    metrics = Metrics(folder.metrics, method=method, seed=seed, reported=view)
    for round, scores in enumerate(accuracy, 1):
        ids = list(range(len(scores)))
        both = {"client": ids, "samples": 10, "participant": True, "round": round}
        rows = [
            both | {"point": point, "model": model, "split": "test", "accuracy": scores, "loss": 1 / round},
            both
            | {"point": "post", "model": "personalised", "split": "train"}
            | {"accuracy": [np.nan] * len(ids), "loss": 0.5 / round},
        ]
        if validation is not None:
            held = {"split": "validation", "accuracy": [validation[round - 1]] * len(ids), "loss": 1.0}
            rows.append(both | {"point": point, "model": model} | held)
        metrics.add_round(
            round,
            clients=rows,
            traffic=with_server(ids) if traffic is None else traffic,
            diagnostics=diagnostics or {},
            pairs=[entries(matrix, name) for name, matrix in (pairs or {}).items()],
            participants=len(ids),
            round_seconds=2.0,
            server_seconds=0.5,
            evaluation_seconds=0.25,
            clock=ticks(round) if clock else None,
        )
    metrics.flush(force=True)
    lines = ["client,split,samples," + ",".join(f"class_{label}" for label in range(CLASSES))]
    # Client i has most samples of class i modulo 3.
    counts = [[12 if label == i % CLASSES else i for label in range(CLASSES)] for i in range(CLIENTS)]
    lines += [f"{i},train,{sum(own)},{','.join(map(str, own))}" for i, own in enumerate(counts)]
    write_text(folder.partition_table, "\n".join(lines) + "\n")
    return folder.path


def with_server(ids: Sequence[int]) -> list[dict[str, Any]]:
    """100 bytes to each client and 80 from it."""
    down = {"src": SERVER, "dst": ids, "kind": "w", "values": 25, "bytes": 100}
    return [down, {"src": ids, "dst": SERVER, "kind": "w", "values": 20, "bytes": 80}]


def entries(matrix: np.ndarray, name: str) -> dict[str, Any]:
    """The entries of a matrix that are not NaN, as rows of the table of pairs."""
    receivers, sources = np.nonzero(~np.isnan(matrix))
    return {"name": name, "receiver": receivers, "source": sources, "value": matrix[receivers, sources]}


def ticks(round: int) -> dict[str, Any]:
    """The round of all, as the clock's table has it."""
    begin = 10.0 * (round - 1)
    times = {"iteration": round, "start": begin, "end": begin + 10.0, "outcome": "done"}
    return {"client": [-1], **times, "heard": 0, "staleness": 0.0, "staleness_max": 0}
