"""Draws are functions of their keys, and leave torch's own generator alone."""

import itertools
import subprocess
import sys

import torch

from raypfl.rng import NOBODY, key, numpy_generator, torch_seeded


def test_keys_do_not_change_between_versions_processes_or_machines():
    # A run that is resumed elsewhere continues to the same numbers only while these stay as they are.
    assert key(0, "init") == 199816063552174225
    assert key(1, "batches", 2, 3) == 7641104567792754627
    assert numpy_generator(key(0, "init")).permutation(6).tolist() == [3, 4, 1, 5, 0, 2]
    other = "from raypfl.rng import key; print(key(0, 'init'))"
    shown = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout
    assert int(shown) == key(0, "init")


def test_every_part_of_a_key_counts():
    parts = itertools.product((0, 1, 11), ("a", "b"), (0, 1, 11), (NOBODY, 0, 1, 11))
    keys = [key(*part) for part in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= value < 2**63 for value in keys)


def test_numpy_integers_are_the_same_key_as_pythons():
    ids = torch.tensor([3])
    assert key(0, "batches", 2, ids[0]) == key(0, "batches", 2, int(ids[0]))


def test_a_draw_does_not_depend_on_what_was_drawn_before():
    first = numpy_generator(5).random(3)
    numpy_generator(6).random(100)
    assert (numpy_generator(5).random(3) == first).all()
    assert (numpy_generator(6).random(3) != first).all()


def test_torch_generator_is_seeded_inside_and_untouched_outside():
    state = torch.get_rng_state()
    with torch_seeded(5):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    with torch_seeded(5):
        assert torch.equal(torch.rand(3), first)
    with torch_seeded(6):
        assert not torch.equal(torch.rand(3), first)


def test_torch_generator_is_put_back_after_an_error():
    state = torch.get_rng_state()
    try:
        with torch_seeded(5):
            torch.rand(3)
            raise RuntimeError
    except RuntimeError:
        pass
    assert torch.equal(torch.get_rng_state(), state)
