"""The numbers that the papers print, from one file with a source for each."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("published.csv")


class Printed(NamedTuple):
    """One number of a paper, in the unit of its table: percent where it is an accuracy."""

    value: float
    sd: float | None
    """As printed, over the paper's repetitions."""
    source: str
    """`printed`, or where else it is from."""


@cache
def published() -> dict[tuple[str, str, str, str], Printed]:
    """Every number by paper, table, row and column."""
    with FILE.open(newline="") as file:
        return {
            (line["paper"], line["table"], line["row"], line["column"]): Printed(
                float(line["value"]), float(line["sd"]) if line["sd"] else None, line["source"]
            )
            for line in csv.DictReader(file)
        }
