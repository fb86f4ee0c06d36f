"""Every test of the contract; `from raypfl.testing.contract import *` in a module that has a `TABLE`."""

from raypfl.testing.contract_clock import *  # noqa: F403
from raypfl.testing.contract_engine import *  # noqa: F403
from raypfl.testing.contract_rows import *  # noqa: F403
from raypfl.testing.contract_sharding import *  # noqa: F403
from raypfl.testing.table import pytest_generate_tests

__all__ = [
    "pytest_generate_tests",
    *(name for name in dir() if name.startswith(("federation", "small_blocks", "test_"))),
]
