"""Crops and flips: what torchvision does to one image, by keys of a client's own."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torchvision.transforms.functional import crop, hflip, pad

from raypfl.errors import ConfigError
from raypfl.training.augmentation import Augmentation, Changes, draw_changes


def drawn(options, shapes=((3, 4), (2, 4), (1, 1)), draws=(1, 2, 3)):
    return draw_changes(options, shapes, draws)


def test_as_torchvision_does_it_image_by_image():
    changes = drawn(Augmentation(crop=2))
    x = torch.randn(3, 4, 3, 5, 6)
    found = changes.apply(x, slice(0, 3), 1)
    for client in range(3):
        for sample in range(4):
            top, left, flip = (int(field[client, 1, sample]) for field in changes[:3])
            expected = crop(pad(x[client, sample], 2), top, left, 5, 6)
            assert torch.equal(found[client, sample], hflip(expected) if flip else expected)


def test_every_shift_occurs_and_half_are_flipped():
    changes = draw_changes(Augmentation(crop=2), [(200, 50)], [7])
    for field in (changes.down, changes.right):
        assert np.unique(field).tolist() == [0, 1, 2, 3, 4]
        assert abs(field.mean() - 2) < 0.05
    assert abs(changes.flip.mean() - 0.5) < 0.02


def test_draws_belong_to_a_client_and_not_to_its_company():
    together, alone = drawn(Augmentation()), drawn(Augmentation(), [(2, 4)], [2])
    for one, other in zip(together[:3], alone[:3], strict=True):
        assert np.array_equal(one[1, :2], other[0])


def test_only_what_was_asked_for():
    assert not drawn(Augmentation(crop=3, flip=False)).flip.any()
    x = torch.randn(2, 3, 1, 4, 4)
    still = Changes(*(np.zeros((2, 1, 3), int),) * 3, crop=0)
    assert torch.equal(still.apply(x, slice(0, 2), 0), x)
    flipped = still._replace(flip=np.ones((2, 1, 3), int))
    assert torch.equal(flipped.apply(x, torch.tensor([0, 1]), 0), x.flip(-1))


def test_rows_of_an_index_are_their_clients():
    changes, x = drawn(Augmentation(crop=1)), torch.randn(2, 4, 1, 4, 4)
    rows = torch.tensor([1, 0])
    found = changes.apply(x, rows, 0)
    assert torch.equal(found[0], changes.apply(x[:1], torch.tensor([1]), 0)[0])
    assert torch.equal(found[1], changes.apply(x[1:], slice(0, 1), 0)[0])


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValidationError, match="change nothing"):
        Augmentation(crop=0, flip=False)
    with pytest.raises(ConfigError, match="samples have shape 60"):
        Augmentation().check((60,))
    with pytest.raises(ConfigError, match=r"crop = 8 shifts images of 1 x 8 x 8 .* less than 8"):
        Augmentation(crop=8).check((1, 8, 8))
