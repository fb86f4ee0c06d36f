import numpy as np
import pytest

from raypfl.data.normalise import Normalisation, apply_scale, find_scale
from raypfl.errors import DataError


def normalise(
    images: np.ndarray, method: Normalisation, num_train: int, name: str = "toy", pad: int | None = None
) -> np.ndarray:
    return apply_scale(images, find_scale(method, name, images, num_train, white=255.0), pad)


@pytest.fixture
def images() -> np.ndarray:
    """Three images of 1x2 pixels, two channels; the third is the test split."""
    return np.array([[[[0, 2]], [[10, 10]]], [[[4, 6]], [[30, 30]]], [[[255, 255]], [[0, 0]]]], np.uint8)


def test_statistics_are_per_channel_and_of_the_training_split_only(images: np.ndarray) -> None:
    x = normalise(images, "statistics", num_train=2)
    # Channel 0: values 0, 2, 4, 6: mean 3, sd sqrt(5). Channel 1: 10, 10, 30, 30: mean 20, sd 10.
    np.testing.assert_allclose(x[:2, 0, 0], (np.array([[0, 2], [4, 6]]) - 3) / np.sqrt(5), rtol=1e-6)
    np.testing.assert_allclose(x[:, 1, 0, 0], [-1, 1, -2], rtol=1e-6)
    assert x.dtype == np.float32
    assert x.flags.c_contiguous


def test_statistics_over_many_chunks_equal_those_of_the_whole() -> None:
    images = np.random.default_rng(0).integers(0, 256, (1000, 3, 4, 5), np.uint8)
    scale = find_scale("statistics", "toy", images, 700, white=255.0)
    np.testing.assert_allclose(scale.offset[:, 0, 0], images[:700].mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(scale.divisor[:, 0, 0], images[:700].std((0, 2, 3)), rtol=1e-12)


def test_statistics_survive_a_large_offset() -> None:
    """E[x^2] - E[x]^2 would lose every digit here."""
    images = (np.arange(4.0) + 1e9).reshape(4, 1, 1, 1)
    assert find_scale("statistics", "toy", images, 4, white=1.0).divisor.item() == np.sqrt(1.25)


def test_pixel_is_over_both_splits_in_grey_levels(images: np.ndarray) -> None:
    x = normalise(images, "pixel", num_train=2)
    pixel = np.array([0.0, 4.0, 255.0])
    np.testing.assert_allclose(x[:, 0, 0, 0], (pixel - pixel.mean()) / (pixel.std() + 0.001), rtol=1e-6)


def test_half_and_none(images: np.ndarray) -> None:
    assert normalise(images, "half", 2)[2].ravel().tolist() == [1, 1, -1, -1]
    np.testing.assert_array_equal(normalise(images, "none", 2), (images / 255).astype(np.float32))


def test_published_constants_are_for_white_one() -> None:
    white = np.full((1, 3, 1, 1), 255, np.uint8)
    x = normalise(white, "published", 1, name="cifar10")
    np.testing.assert_allclose(x.ravel(), [0.5086 / 0.2023, 0.5178 / 0.1994, 0.5535 / 0.2010], rtol=1e-6)


def test_padding_is_a_border_of_zeros_after_normalising() -> None:
    images = np.full((1, 1, 28, 28), 255, np.uint8)
    x = normalise(images, "none", 1, pad=32)
    assert x.shape == (1, 1, 32, 32)
    assert x.sum() == 28 * 28
    assert (x[0, 0, 2:30, 2:30] == 1).all()


def test_padding_to_less_than_the_image_is_an_error(images: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"data\.pad = 1 is smaller than the images \(1 x 2\)"):
        normalise(images, "none", 2, pad=1)


def test_a_constant_channel_has_no_sd_to_divide_by() -> None:
    images = np.stack([np.array([[[1, 2]], [[7, 7]]])] * 2).astype(np.uint8)
    with pytest.raises(DataError, match=r"channel 1 is constant \(7\)"):
        normalise(images, "statistics", 2)
