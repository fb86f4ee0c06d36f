"""The numbers of a run: Parquet tables that can be read while the run goes on.

| file | one row for |
|---|---|
| `clients.parquet` | round, client, point, model, split |
| `rounds.parquet` | round, point, model, split: statistics over clients, traffic and seconds of that round |
| `traffic.parquet` | message of the simulated system |
| `diagnostics.parquet` | number that a method gives of its server step, where they are asked for |
| `clock.parquet` | iteration of a client and, as client -1, round of all, in virtual time |
| `dropped.parquet` | client that was left out of a round, because it raised or hung |

Round t is the state after t server updates. Point `post` of round t is after its local training; point
`pre` of round t is the model as received after it, known only when round t + 1 begins. Every round has the
row (post, personalised, train), evaluated or not: summing over those rows counts each round once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raypfl.errors import StorageError
from raypfl.records.statistics import EMPTY, ClientStatistics, client_statistics
from raypfl.records.storage import Place
from raypfl.records.tables import TEXT, GrowingTable

Columns = Mapping[str, npt.ArrayLike]
"""Rows by column: arrays [rows], or a scalar for a column that is the same in all of them."""

SERVER: Final = -1
"""Source or destination of a message that is not a client."""

POINTS: Final = ("pre", "post")
MODELS: Final = ("personalised", "global", "alternative")
SPLITS: Final = ("train", "validation", "test")
TRAINING: Final = ("post", "personalised", "train")
"""Point, model and split of the row that every round has."""

RUN_FIELDS = [("method", TEXT), ("seed", pa.int64()), ("round", pa.int32())]
CLIENT_SCHEMA = pa.schema(
    [
        *RUN_FIELDS,
        ("client", pa.int32()),
        ("point", TEXT),
        ("model", TEXT),
        ("split", TEXT),
        ("accuracy", pa.float64()),
        ("loss", pa.float64()),
        ("samples", pa.int64()),
        ("participant", pa.bool_()),
    ]
)
ROUND_SCHEMA = pa.schema(
    [
        *RUN_FIELDS,
        ("point", TEXT),
        ("model", TEXT),
        ("split", TEXT),
        ("clients", pa.int32()),
        ("accuracy_mean", pa.float64()),
        ("accuracy_weighted", pa.float64()),
        ("accuracy_sd", pa.float64()),
        ("accuracy_worst_decile", pa.float64()),
        ("loss_mean", pa.float64()),
        ("participants", pa.int32()),
        ("upload_bytes", pa.int64()),
        ("download_bytes", pa.int64()),
        ("round_seconds", pa.float64()),
        ("server_seconds", pa.float64()),
        ("evaluation_seconds", pa.float64()),
    ]
)
TRAFFIC_SCHEMA = pa.schema(
    [
        *RUN_FIELDS,
        ("src", pa.int32()),
        ("dst", pa.int32()),
        ("kind", TEXT),
        ("values", pa.int64()),
        ("bytes", pa.int64()),
    ]
)
DIAGNOSTICS_SCHEMA = pa.schema([*RUN_FIELDS, ("name", TEXT), ("value", pa.float64())])
CLOCK_SCHEMA = pa.schema(
    [
        *RUN_FIELDS,
        ("client", pa.int32()),
        ("iteration", pa.int32()),
        ("start", pa.float64()),
        ("end", pa.float64()),
        ("outcome", TEXT),
        ("heard", pa.int32()),
        ("staleness", pa.float64()),
        ("staleness_max", pa.int32()),
    ]
)
DROPPED_SCHEMA = pa.schema([*RUN_FIELDS, ("client", pa.int32()), ("reason", TEXT)])
GROUP = ("round", "point", "model", "split")

MINIMUM_PAUSE_SECONDS = 2.0
PAUSE_PER_COST = 20.0
"""Rewriting the tables takes at most about a twentieth of the run."""


class RoundCosts(NamedTuple):
    """What one round took; repeated in each of its rows in `rounds.parquet`."""

    participants: int
    upload_bytes: int  # sent by clients, to the server or to peers
    download_bytes: int  # received by clients, from the server or from peers
    round_seconds: float  # the whole round, wall clock
    server_seconds: float  # of it, in the hub
    evaluation_seconds: float  # of it, in evaluation


NO_COSTS: Final = RoundCosts(0, 0, 0, 0.0, 0.0, 0.0)
"""Of round 0, the models before any training."""


class Metrics:
    """The tables of one run (one method, one seed)."""

    def __init__(
        self,
        folder: Place,
        *,
        method: str,
        seed: int,
        reported: tuple[str, str],
        clock: Callable[[], float] = time.monotonic,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin the tables in `folder`, or continue those that are there (then call `truncate`).

        Args:
            folder: the run's metrics folder.
            method: name of the method, the same in every row.
            seed: seed of the run, the same in every row.
            reported: (model, point) whose accuracy the method's papers report; kept in the files' metadata.
            clock: seconds, for the pace of writing.
            before_write: called before tables are written; nothing is if it raises.

        Raises:
            StorageError: tables cannot be written, or those found belong to something else.
        """
        self._run: dict[str, int | str] = {"method": method, "seed": seed}
        metadata = {"method": method, "seed": str(seed), "reported": "/".join(reported)}

        def table(name: str, schema: pa.Schema) -> GrowingTable:
            return GrowingTable(folder / f"{name}.parquet", schema.with_metadata(metadata))

        self._clients = table("clients", CLIENT_SCHEMA)
        self._rounds = table("rounds", ROUND_SCHEMA)
        self._traffic = table("traffic", TRAFFIC_SCHEMA)
        self._diagnostics = table("diagnostics", DIAGNOSTICS_SCHEMA)
        self._times = table("clock", CLOCK_SCHEMA)
        self._dropped = table("dropped", DROPPED_SCHEMA)
        self._costs = {0: NO_COSTS}
        self._clock, self._before_write = clock, before_write
        self._next_write = -np.inf
        self._last = 0
        self.written = 0
        """The last round of which everything that is known is in the files."""

    def add_round(
        self,
        round: int,
        *,
        clients: Sequence[Columns],
        traffic: Sequence[Columns],
        diagnostics: Mapping[str, float] = MappingProxyType({}),
        participants: int,
        round_seconds: float,
        server_seconds: float = 0.0,
        evaluation_seconds: float = 0.0,
        clock: Columns | None = None,
        dropped: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Record a round that is complete, and write if it is time to.

        Args:
            round: number of the round, from 1.
            clients: blocks of rows, in any order, with columns round, client, point, model, split, accuracy,
                loss, samples, participant: this round's training and POST rows and the previous round's PRE.
            traffic: blocks of this round's messages: columns src, dst, kind, values, bytes.
            diagnostics: numbers about the server's step, by name.
            participants: how many clients trained.
            round_seconds: wall-clock seconds of the whole round.
            server_seconds: of these, in the hub.
            evaluation_seconds: of these, in evaluation.
            clock: iterations that ended or began, in virtual time, if there is a clock: columns client,
                iteration, start, end, outcome, heard, staleness, staleness_max.
            dropped: clients that were left out of the round, each with the reason.

        Raises:
            StorageError: the tables cannot be written now; the round is recorded, and nothing is lost.
        """
        messages = _joined(traffic, TRAFFIC_SCHEMA, {**self._run, "round": round})
        messages = _sorted(messages, ("src", "dst", "kind"))
        costs = RoundCosts(
            participants,
            int(messages["bytes"][messages["src"] != SERVER].sum()),
            int(messages["bytes"][messages["dst"] != SERVER].sum()),
            round_seconds,
            server_seconds,
            evaluation_seconds,
        )
        # PRE rows of the previous round come with this one, so its costs are kept that long.
        self._costs = {past: known for past, known in self._costs.items() if past == round - 1}
        self._costs[round] = costs
        self._traffic.append(messages)
        numbers: Columns = {"name": list(diagnostics), "value": list(diagnostics.values()), "round": round}
        self._diagnostics.append(_joined([numbers], DIAGNOSTICS_SCHEMA, self._run))
        if clock is not None:
            times = _joined([clock], CLOCK_SCHEMA, {**self._run, "round": round})
            self._times.append(_sorted(times, ("start", "client")))
        left_out: Columns = {"client": list(dropped), "reason": list(dropped.values()), "round": round}
        self._dropped.append(_sorted(_joined([left_out], DROPPED_SCHEMA, self._run), ("client",)))
        self._add_clients(clients, training_of=round)
        self._last = round
        self.flush()

    def add_evaluation(self, clients: Sequence[Columns]) -> None:
        """Record client rows outside a round: the PRE rows after the last one. Columns as in `add_round`."""
        self._add_clients(clients, training_of=None)
        self.flush()

    def flush(self, *, force: bool = False) -> None:
        """Write what is pending if the pace allows it, or at once with `force` (checkpoints, the end).

        Raises:
            StorageError: a table cannot be written; nothing that was in it is lost.
        """
        begin = self._clock()
        due = [table for table in self._tables() if table.has_pending]
        if not due or (begin < self._next_write and not force):
            return
        try:
            self._before_write()
            for table in due:
                table.write()
            self.written = self._last
        finally:
            # Also after a failure: the run has better things to do than to try after every round.
            end = self._clock()
            self._next_write = end + max(MINIMUM_PAUSE_SECONDS, PAUSE_PER_COST * (end - begin))

    def truncate(self, round: int, *, evaluated: bool = True) -> None:
        """Go back to the checkpoint of `round`, whose PRE rows are recorded again when the next one runs.

        Args:
            round: completed rounds.
            evaluated: whether `round` is one that is evaluated; a last round that no longer is the last may
                not be, and then keeps its training rows only.

        Raises:
            StorageError: the tables end before that round, or cannot be written; no row is dropped then.
        """
        self.flush(force=True)
        self._costs = {round: self._stored_costs(round) if round > 0 else NO_COSTS}
        last = pc.field("point") == "post"
        if not evaluated:
            last &= pc.field("split") == "train"
        for table in (self._clients, self._rounds):
            table.write(keep=(pc.field("round") < round) | ((pc.field("round") == round) & last))
        for table in (self._traffic, self._diagnostics, self._times, self._dropped):
            table.write(keep=pc.field("round") <= round)
        self._last = self.written = round

    @property
    def has_pending(self) -> bool:
        """Whether there is something that the files do not have yet."""
        return any(table.has_pending for table in self._tables())

    def _tables(self) -> tuple[GrowingTable, ...]:
        # Rounds come last: who reads a row there finds its clients and messages.
        return self._traffic, self._diagnostics, self._times, self._dropped, self._clients, self._rounds

    def _add_clients(self, blocks: Sequence[Columns], *, training_of: int | None) -> None:
        rows = _sorted(_joined(blocks, CLIENT_SCHEMA, self._run), (*GROUP, "client"))
        _check_vocabulary(rows)
        groups = dict(_groups(rows))
        if training_of is not None:
            groups.setdefault((training_of, *TRAINING), EMPTY)
        self._clients.append(rows)
        for (round, point, model, split), statistics in groups.items():
            assert round in self._costs, f"client rows of round {round}, recorded so far: {list(self._costs)}"
            group = {"round": round, "point": point, "model": model, "split": split}
            row = {**group, **statistics._asdict(), **self._costs[round]._asdict()}
            self._rounds.append(_joined([row], ROUND_SCHEMA, self._run))

    def _stored_costs(self, round: int) -> RoundCosts:
        rows = [row for batch in self._rounds.batches() for row in batch.to_pylist() if row["round"] == round]
        if not rows:
            raise StorageError(
                f"{self._rounds.path} has no round {round}, where the checkpoint is. "
                "Restore the metrics folder, or start a new run."
            )
        return RoundCosts(**{name: rows[0][name] for name in RoundCosts._fields})


def _joined(
    blocks: Sequence[Columns], schema: pa.Schema, constant: Mapping[str, int | str]
) -> dict[str, np.ndarray]:
    """Blocks one after another, scalars and the constant columns spread over the rows."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in schema.names}
    for block in blocks:
        columns = {**block, **constant}
        assert columns.keys() == set(schema.names), f"columns {list(columns)}, expected {schema.names}"
        spread = np.broadcast_arrays(*(np.atleast_1d(np.asarray(columns[name])) for name in schema.names))
        if spread[0].size:
            for name, values in zip(schema.names, spread, strict=True):
                parts[name].append(values)
    return {name: np.concatenate(values) if values else np.empty(0) for name, values in parts.items()}


def _sorted(rows: Mapping[str, np.ndarray], by: Sequence[str]) -> dict[str, np.ndarray]:
    """Rows in order, so that neither a file nor a sum depends on which host answered first."""
    keys = (rows[name] for name in reversed(by))
    order = np.lexsort([key.astype(str) if key.dtype == object else key for key in keys])
    return {name: column[order] for name, column in rows.items()}


def _check_vocabulary(rows: Mapping[str, np.ndarray]) -> None:
    for name, words in (("point", POINTS), ("model", MODELS), ("split", SPLITS)):
        unknown = set(np.unique(rows[name])) - set(words)
        assert not unknown, f"{name} {unknown}, expected one of {words}"


def _groups(rows: Mapping[str, np.ndarray]) -> Iterator[tuple[tuple[int, str, str, str], ClientStatistics]]:
    """Statistics of each (round, point, model, split) in sorted rows."""
    if not len(rows["round"]):
        return
    changed = np.logical_or.reduce([rows[name][1:] != rows[name][:-1] for name in GROUP])
    for at in np.split(np.arange(len(changed) + 1), np.flatnonzero(changed) + 1):
        assert (np.diff(rows["client"][at]) > 0).all(), "a client is recorded twice"
        round, point, model, split = (rows[name][at[0]] for name in GROUP)
        values = (rows[name][at] for name in ("accuracy", "loss", "samples"))
        yield (int(round), str(point), str(model), str(split)), client_statistics(*values)
