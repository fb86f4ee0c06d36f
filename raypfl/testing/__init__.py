"""What a method is held to, as tests: for those of the project and for those of other packages.

A test module with the rows of a method is all that it takes:

    from raypfl.testing import Row, model
    from raypfl.testing.contract import *

    TABLE = [Row("fedprox", Config(mu=0.1), up=model, down=model, away="newest")]

Needs pytest: `pip install raypfl[test]`.
"""

import pytest

# Before they are imported: a failed assertion then shows its values, as in any test module.
pytest.register_assert_rewrite(
    "raypfl.testing.harness",
    "raypfl.testing.contract_rows",
    "raypfl.testing.contract_engine",
    "raypfl.testing.contract_clock",
)

from raypfl.testing.row import (  # noqa: E402
    Row,
    body,
    body_and_head,
    feature,
    mask,
    model,
    nothing,
    one,
    weights,
)

__all__ = ["Row", "body", "body_and_head", "feature", "mask", "model", "nothing", "one", "weights"]
