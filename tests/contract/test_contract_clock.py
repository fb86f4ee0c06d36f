"""What every method promises under a virtual clock; `method_table.py` has the methods."""

from __future__ import annotations

from method_table import PEERS
from method_table import TABLE as METHOD_TABLE

from raypfl.methods.ua_pdfl import Config as UAPDFL
from raypfl.testing.contract_clock import *  # noqa: F403 - the tests
from raypfl.testing.row import Row, nothing
from raypfl.testing.table import pytest_generate_tests  # noqa: F401
from raypfl.topology import KOut

UA = [
    Row("ua_pdfl of three", UAPDFL(topology=KOut(k=3), tau=0.01), down=nothing, **PEERS),
    Row(
        "ua_pdfl of three, live",
        UAPDFL(topology=KOut(k=3), tau=0.01, aux_avg="samplesize_peers"),
        down=nothing,
        **PEERS,
    ),
]
TABLE = [*METHOD_TABLE, *UA]
