"""Messages across process borders: their own bytes, nothing shared by accident, rows where they belong."""

import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from raypfl.engine.messages import decode, encode, put, stack, take, trim
from raypfl.methods import Nothing

CPU = torch.device("cpu")


class Note(NamedTuple):
    w: Tensor
    place: Tensor


def note(num_rows: int = 4) -> Note:
    return Note(torch.arange(3.0 * num_rows).view(num_rows, 3), torch.arange(num_rows)[:, None])


def bytes_of(message: tuple) -> int:
    return len(pickle.dumps(message, protocol=5))


@pytest.mark.parametrize(
    "view",
    [
        lambda big: big[:4],
        lambda big: big[:, :100],
        lambda big: big[::40, 3:1003],
        lambda big: big[:1].expand(4, -1),
        lambda big: big[:4].T,
    ],
    ids=["rows", "columns", "strided", "expanded", "transposed"],
)
def test_views_are_sent_with_their_own_bytes(view):
    big = torch.randn(160, 1000)
    seen = view(big)
    sent = pickle.loads(pickle.dumps(encode(Note(seen, torch.zeros(1))), protocol=5))
    assert bytes_of(encode(Note(seen, torch.zeros(1)))) < 4 * seen.numel() + 600
    assert torch.equal(decode(sent, CPU).w, seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_dtypes_and_bits_survive(dtype):
    field = torch.tensor([[0.0, 1.0, -0.0, 3.5]]).to(dtype)
    (found, _) = decode(encode(Note(field, field)), CPU)
    assert found.dtype == dtype
    assert torch.equal(found, field)


def test_gradients_stay_at_home():
    leaf = torch.ones(2, 3, requires_grad=True)
    assert not decode(encode(Note(leaf, leaf * 2)), CPU).place.requires_grad


def test_read_only_arrays_are_read_without_a_warning():
    array = np.ones((2, 3), np.float32)
    array.flags.writeable = False
    assert torch.equal(decode(Note(array, array), CPU).w, torch.ones(2, 3))


def test_messages_without_content_pass():
    assert decode(encode(Nothing()), CPU) == take(Nothing(), torch.tensor([1])) == Nothing()
    assert put(Nothing(), torch.tensor([1]), Nothing()) == stack(
        [(torch.tensor([0]), Nothing())], torch.tensor([0])
    )


def test_take_keeps_shared_fields_whole():
    rows = torch.tensor([2, 0])
    own = take(note(), rows)
    assert own.w.tolist() == [[6, 7, 8], [0, 1, 2]] and own.place.tolist() == [[2], [0]]
    # By name, not by shape: with one participant every field has one row.
    shared = take(note(1), torch.tensor([], dtype=torch.int64), frozenset({"w"}))
    assert shared.w.tolist() == [[0, 1, 2]] and shared.place.shape == (0, 1)


class Shelf(NamedTuple):
    models: Tensor
    sizes: Tensor
    place: Tensor


POOLS = {"models": "place", "sizes": "place"}


def shelf(*place: list[int]) -> Shelf:
    return Shelf(torch.arange(12.0).view(1, 4, 3), torch.arange(4)[None, :, None], torch.tensor(place))


def test_trim_keeps_the_rows_that_somebody_receives():
    """Row numbers follow, and -1 stays: nobody receives another row than before."""
    some = shelf([3, 0], [3, -1])
    found = trim(some, POOLS)
    assert found.models.tolist() == [[[0, 1, 2], [9, 10, 11]]] and found.sizes.tolist() == [[[0], [3]]]
    assert found.place.tolist() == [[1, 0], [1, -1]]
    assert torch.equal(some.place, shelf([3, 0], [3, -1]).place)


def test_trim_copies_nothing_where_all_are_received():
    whole = shelf([3, 0], [1, 2])
    assert trim(whole, POOLS) is whole and trim(note(), {}).w.shape == (4, 3)


def test_trim_leaves_nothing_for_nobody():
    nobody = shelf([3, 0])._replace(place=torch.zeros(0, 2, dtype=torch.int64))
    assert trim(nobody, POOLS).models.shape == (1, 0, 3)
    assert trim(shelf([-1, -1]), POOLS).place.tolist() == [[-1, -1]]


@pytest.mark.parametrize("rows", [[1], [3, 0], [0, 1, 2, 3], [2, 3, 1, 0]])
def test_put_replaces_some_rows_of_a_copy(rows):
    new_w = -1.0 - torch.arange(len(rows))[:, None].expand(-1, 3)
    before, new = note(), Note(new_w, torch.ones(len(rows), 1, dtype=torch.int64))
    after = put(before, torch.tensor(rows), new)
    expected = note().w
    for place, row in enumerate(rows):
        expected[row] = new.w[place]
    assert torch.equal(after.w, expected)
    assert torch.equal(before.w, note().w) and torch.equal(before.place, note().place)


def test_stack_follows_ids_not_arrival():
    ids = torch.tensor([2, 5, 7, 9])
    late, early = (
        (torch.tensor([7, 2]), take(note(), torch.tensor([2, 0]))),
        (
            torch.tensor([5, 9]),
            take(note(), torch.tensor([1, 3])),
        ),
    )
    for parts in ([late, early], [early, late]):
        whole = stack(parts, ids)
        assert torch.equal(whole.w, note().w) and torch.equal(whole.place, note().place)
