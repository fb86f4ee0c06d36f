"""A Parquet file that grows while others read it.

Parquet cannot be appended to, so the file is rewritten with the new rows at its end and replaced in one
step. The file is the store: only rows not yet written are in memory, whatever the length of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypfl.errors import StorageError
from raypfl.records.files import replacing
from raypfl.records.storage import Place, parquet

ROWS_PER_GROUP = 1 << 17

TEXT = pa.dictionary(pa.int32(), pa.string())
"""Type of a column of few distinct words (int32 is what Parquet gives back)."""


class GrowingTable:
    """Rows of one schema in one file. A new object on an existing file continues it."""

    def __init__(self, path: Place, schema: pa.Schema) -> None:
        """Open the file, or write an empty one, so that readers find it from the start.

        Raises:
            StorageError: the file is damaged, has other columns, or cannot be written.
        """
        self.path = path
        self.schema = schema
        self._pending: list[pa.Table] = []
        # Measured numbers rarely repeat: looking for repetitions makes writing three times slower.
        self._repetitive = [field.name for field in schema if not pa.types.is_floating(field.type)]
        if path.exists():
            self._check_schema()
        else:
            self._rewrite(())

    @property
    def has_pending(self) -> bool:
        """Whether there are rows that the file does not have yet."""
        return bool(self._pending)

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add rows, one array [rows] per column of the schema; they are on disk after `write`."""
        if not len(columns[self.schema.names[0]]):
            return
        arrays = [_array(columns[field.name], field.type) for field in self.schema]
        self._pending.append(pa.Table.from_arrays(arrays, schema=self.schema))

    def write(self, keep: pc.Expression | None = None) -> None:
        """Put pending rows at the end of the file; with `keep`, drop all rows that do not meet it.

        Raises:
            StorageError: the file cannot be written; it and the pending rows are as they were.
        """
        pending = chain.from_iterable(table.to_batches() for table in self._pending)
        rows = (pa.Table.from_batches([batch]) for batch in chain(self.batches(), pending))
        self._rewrite(rows if keep is None else (part.filter(keep) for part in rows))
        self._pending = []

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The file's rows, a bounded number at a time."""
        with pq.ParquetFile(**parquet(self.path)) as file:
            yield from file.iter_batches(ROWS_PER_GROUP)

    def _rewrite(self, rows: Iterable[pa.Table]) -> None:
        with (
            replacing(self.path) as temporary,
            pq.ParquetWriter(temporary, self.schema, use_dictionary=self._repetitive) as writer,
        ):
            for group in _grouped(rows):
                writer.write_table(group.unify_dictionaries())

    def _check_schema(self) -> None:
        try:
            at = parquet(self.path)
            found = pq.read_schema(at["source"], filesystem=at.get("filesystem"))
        except (OSError, pa.ArrowInvalid) as error:
            raise StorageError(
                f"{self.path} cannot be read as Parquet: {error}. Restore it, or start a new run."
            ) from error
        if not found.equals(self.schema, check_metadata=True):
            raise StorageError(
                f"{self.path} has other columns or belongs to another run: "
                f"found\n{found}\nexpected\n{self.schema}\n"
                "Continue the run with the raypfl version and method that began it, or start a new run."
            )


def _array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, kind)


def _grouped(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join small parts, so that frequent writes do not leave a file of tiny row groups."""
    held: list[pa.Table] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= ROWS_PER_GROUP:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)
