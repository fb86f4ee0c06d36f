"""Pieces of work on several threads: in order, few at a time, and the same bits for any number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from raypfl.algebra import (
    Csr,
    all_rows_equal,
    csr_from_dense,
    distances,
    masked_mean,
    mix,
    mix_groups,
    pairwise_distances,
    pairwise_similarities,
    pull_together,
    row_distances,
)
from raypfl.algebra.threads import each_piece, on_threads, shares
from raypfl.engine.threads import ThreadPool

ROWS, COLUMNS = 6, 70_001
"""Nine sections, the last of them with less than one block."""


def rows(num_models: int = ROWS, num_columns: int = COLUMNS, seed: int = 0) -> Tensor:
    return torch.randn(num_models, num_columns, generator=torch.Generator().manual_seed(seed))


def square(num_models: int) -> Tensor:
    return rows(num_models, num_models, 1).double().fill_diagonal_(0.0)


def ring(step: int) -> Csr:
    """Every receiver hears itself and another."""
    weights = torch.eye(ROWS) + torch.eye(ROWS).roll(step, 0) / 3
    return csr_from_dense(weights)


COMPUTED: dict[str, Callable[[Tensor], object]] = {
    "pairwise_distances": pairwise_distances,
    "pairwise_similarities": pairwise_similarities,
    "row_distances": lambda w: row_distances(w, w.flip(0)),
    "all_rows_equal": all_rows_equal,
    "pull_together": lambda w: pull_together(square(len(w)), w),
    "mix": lambda w: mix(square(len(w))[:2], w),
    "mix_groups": lambda w: mix_groups([(slice(0, 50_000), ring(1)), (slice(50_000, COLUMNS), ring(2))], w),
    "masked_mean": lambda w: masked_mean(ring(1), w, w > 0, ring(2)),
}


@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize("name", COMPUTED)
def test_bits_do_not_know_of_threads(name: str, count: int) -> None:
    w_KP = rows()
    expected = COMPUTED[name](w_KP)
    used = set()

    def noted(number: int) -> None:
        used.add(threading.get_ident())

    with on_threads(ThreadPool(count)):
        list(each_piece(noted, range(count)))
        found = COMPUTED[name](w_KP)
    assert threading.get_ident() not in used, "nothing was done on a thread"
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and torch.equal(expected, found)
    else:
        assert expected == found


def test_a_mirrored_product_has_the_distances_of_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    w_KP = rows(13, 9000)
    whole, similarities = pairwise_distances(w_KP), pairwise_similarities(w_KP)
    monkeypatch.setattr(distances, "ROWS_AT_ONCE", 4)
    torch.testing.assert_close(pairwise_distances(w_KP), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(pairwise_similarities(w_KP), similarities, rtol=1e-9, atol=1e-14)
    with on_threads(ThreadPool(2)):
        assert torch.equal(pairwise_distances(w_KP), pairwise_distances(w_KP).T)


def test_a_gram_matrix_that_is_too_large_for_each_thread_is_made_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distances, "MOST_ENTRIES", ROWS**2 - 1)
    w_KP = rows()
    expected = pairwise_distances(w_KP)
    threads = ThreadPool(2)

    def refuse(*_: object) -> None:
        raise AssertionError("a thread was asked")

    monkeypatch.setattr(threads, "each", refuse)
    with on_threads(threads):
        assert torch.equal(pairwise_distances(w_KP), expected)
        with pytest.raises(AssertionError, match="was asked"):
            row_distances(w_KP, w_KP)


def test_what_pieces_give_comes_in_their_order_and_few_are_held() -> None:
    begun: list[int] = []

    def slow_first(piece: int) -> int:
        begun.append(piece)
        time.sleep(0.05 if piece == 0 else 0.0)
        return piece

    with on_threads(ThreadPool(2)):
        coming = each_piece(slow_first, range(15))
        assert next(coming) == 0
        assert len(begun) <= 5, "all were begun before the first was taken"
        assert list(coming) == list(range(1, 15))


def test_an_error_in_a_piece_reaches_whoever_asked() -> None:
    def fails(piece: int) -> int:
        raise ValueError(f"piece {piece}")

    with on_threads(ThreadPool(2)), pytest.raises(ValueError, match="piece 0"):
        list(each_piece(fails, range(3)))


def test_threads_work_as_the_process_does() -> None:
    def state(_: int) -> tuple[int, bool]:
        return torch.get_num_threads(), torch.is_grad_enabled()

    with on_threads(ThreadPool(2)):
        here = torch.get_num_threads(), True
        assert list(each_piece(state, range(4))) == [here] * 4
        with torch.no_grad():
            assert list(each_piece(state, range(2))) == [(here[0], False)] * 2


def test_shares_hold_every_piece_once() -> None:
    with on_threads(ThreadPool(3)):
        for length in (0, 1, 2, 3, 10):
            found = shares(range(length))
            assert [piece for share in found for piece in share] == list(range(length))
            assert len(found) == min(3, length)
    assert shares(range(4)) == [range(4)]
