"""What every method promises, tested on the bare contract in float64; `method_table.py` has the methods."""

from __future__ import annotations

from collections import Counter

from method_table import TABLE

from raypfl.methods import METHODS
from raypfl.testing.contract_rows import *  # noqa: F403 - the tests
from raypfl.testing.table import pytest_generate_tests  # noqa: F401


def test_every_method_has_a_row() -> None:
    assert {row.options.name for row in TABLE} == set(METHODS)
    assert not [name for name, count in Counter(row.name for row in TABLE).items() if count > 1]
