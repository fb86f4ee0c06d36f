"""`raypfl bench sweep`: what is known to be wrong before anything is timed."""

from pathlib import Path

import pytest

from raypfl.console import Console
from raypfl.errors import ConfigError
from raypfl.sweep import bench


@pytest.mark.parametrize("override", ["storage_path=/tmp/here", "name=mine"])
def test_where_results_go_is_not_for_the_caller_to_say(override: str) -> None:
    with pytest.raises(ConfigError, match="temporary folders of its own: leave out storage_path and name"):
        bench.run(Path("sweep.yaml"), ["rounds=1", override], 1, Console())
