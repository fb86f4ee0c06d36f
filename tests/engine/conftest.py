"""One crew of actors for all tests: starting them takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from raypfl.engine.ray import Crew


@pytest.fixture(scope="session")
def crew(cluster: Path) -> Iterator[Crew]:
    """Two hosts with one CPU each, and a hub that asks for none."""
    from raypfl.engine.placement import Placement
    from raypfl.engine.ray import Crew

    with closing(Crew(Placement(2, host_cpus=1, host_gpus=0, server_cpus=0, server_gpus=0))) as crew:
        crew.complete()
        yield crew
