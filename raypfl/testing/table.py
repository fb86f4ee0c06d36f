"""Which rows of a test module's `TABLE` a test of the contract is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

from raypfl.testing.row import Row

Test = TypeVar("Test", bound=Callable[..., None])


def only(applies: Callable[[Row], bool]) -> Callable[[Test], Test]:
    """The test is about rows of this kind."""

    def mark(test: Test) -> Test:
        test.applies = applies  # type: ignore[attr-defined]
        return test

    return mark


def with_nets(nets: Callable[[Row], Mapping[str, Any]]) -> Callable[[Test], Test]:
    """The test takes each row with each of the networks, by name, that go with it."""

    def mark(test: Test) -> Test:
        test.nets = nets  # type: ignore[attr-defined]
        return test

    return mark


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Once for each row of the module that imports the test."""
    table: list[Row] | None = getattr(metafunc.module, "TABLE", None)
    if table is None or "row" not in metafunc.fixturenames:
        return
    applies: Any = getattr(metafunc.function, "applies", lambda row: True)
    rows = [row for row in table if applies(row)]
    nets: Any = getattr(metafunc.function, "nets", None)
    if nets is None:
        metafunc.parametrize("row", rows, ids=[row.name for row in rows])
        return
    pairs = [
        pytest.param(row, net, id=f"{row.name}-{name}") for row in rows for name, net in nets(row).items()
    ]
    metafunc.parametrize("row, net", pairs)
