"""Blocks are cut without regard to hosts, and dealt so that every host has about as many samples."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.world import World
from raypfl.errors import PlacementError


def world(sizes: list[int], block: int) -> World:
    """A run of clients with so many samples each, of one class."""
    federation = SimpleNamespace(num_clients=len(sizes))
    counts = np.array(sizes)[:, None]
    return World(None, federation, (1,), 1, counts, "toy", block, 1)


def test_blocks_are_consecutive_ids_and_the_last_may_be_short():
    cut = world([1] * 7, block=3).blocks()
    assert [own.tolist() for own in cut] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("hosts", [1, 2, 3, 5])
def test_every_block_lives_on_one_host(hosts):
    dealt = deal(world([3, 1, 4, 1, 5, 9, 2, 6, 5], block=2), hosts)
    assert len(dealt) == hosts
    assert sorted(block for own in dealt for block in own) == [0, 1, 2, 3, 4]
    assert all(own == sorted(own) and own for own in dealt)


def test_largest_blocks_go_first_to_the_least_loaded():
    # 9 to the first, 8 to the second, 5 to the second (8 < 9), 4 and 1 to the first (9, then a tie at 13).
    assert deal(world([1, 9, 4, 5, 8], block=1), 2) == [[0, 1, 2], [3, 4]]


def test_equal_blocks_are_dealt_evenly():
    dealt = deal(world([2] * 12, block=2), 3)
    assert [len(own) for own in dealt] == [2, 2, 2]


def test_hosts_with_equal_samples_share_clients_without_any():
    dealt = deal(world([0] * 4, block=1), 2)
    assert [len(own) for own in dealt] == [2, 2]


def test_more_hosts_than_blocks_are_refused_with_the_arithmetic():
    with pytest.raises(
        PlacementError, match=r"4 client hosts for 3 blocks of 2 clients \(5 in all\).*at most 3"
    ):
        deal(world([1] * 5, block=2), 4)


def test_ids_of_blocks_are_ascending():
    assert torch.equal(ids_of(world([1] * 5, block=2), [0, 2]), torch.tensor([0, 1, 4]))
