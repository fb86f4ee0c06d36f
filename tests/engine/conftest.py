"""One Ray cluster, and one crew of actors on it, for all tests: starting them takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import stumbling

if TYPE_CHECKING:
    from raypfl.engine.ray import Crew


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray with six CPUs, by name only; the folder in which its actors are asked to stumble."""
    import ray

    folder = tmp_path_factory.mktemp("stumble")
    with pytest.MonkeyPatch.context() as patch:
        # Actors have the environment that Ray was started in.
        patch.setenv("PYTHONPATH", str(Path(stumbling.__file__).parent))
        patch.setenv(stumbling.VARIABLE, str(folder))
        ray.init(
            address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="error"
        )
    yield folder
    ray.shutdown()


@pytest.fixture(scope="session")
def crew(cluster: Path) -> Iterator[Crew]:
    """Two hosts with one CPU each, and a hub that asks for none."""
    from raypfl.engine.placement import Placement
    from raypfl.engine.ray import Crew

    with closing(Crew(Placement(2, host_cpus=1, host_gpus=0, server_cpus=0, server_gpus=0))) as crew:
        crew.complete()
        yield crew
