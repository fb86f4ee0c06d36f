"""Servers that hold columns together: the contract of the package's methods that declare `columns`."""

from __future__ import annotations

from method_table import TABLE  # noqa: F401 - whose rows

from raypfl.testing.contract_sharding import *  # noqa: F403 - the tests
from raypfl.testing.table import pytest_generate_tests  # noqa: F401
