"""What every method promises when engines run it; `method_table.py` has the methods."""

from __future__ import annotations

from method_table import TABLE

from raypfl.testing.contract_engine import *  # noqa: F403 - the tests
from raypfl.testing.contract_engine import engine_of
from raypfl.testing.harness import Toy, Trace, same, trace
from raypfl.testing.table import pytest_generate_tests  # noqa: F401


def test_traces_that_differ_are_told_apart(federation: Toy) -> None:
    """The comparison itself: other rounds are no match."""
    one = trace(engine_of(TABLE[0], federation), (1,))
    other = trace(engine_of(TABLE[0], federation), (1, 2))
    assert same(one, Trace(*one)) and not same(one, other)
    assert not same(one, one._replace(records=other.records))
    assert not same(one, one._replace(state=other.state))
