import hashlib
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from raypfl.data import SOURCES, DataConfig, Pool, load
from raypfl.data.sources import torchvision_sets
from raypfl.errors import DataError

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)


def pool_of(name: str, **options: object) -> Pool:
    return load(CONFIG.validate_python({"name": name, **options}), seed=0)


def test_every_listed_source_has_a_configuration() -> None:
    for name in SOURCES:
        options = {"file": "a.npz"} if name == "npz" else {}
        assert CONFIG.validate_python({"name": name, **options}).name == name


def test_medmnist_names_are_those_of_the_package() -> None:
    medmnist = pytest.importorskip("medmnist")
    flat = {name for name in medmnist.INFO if not name.endswith("3d")}
    assert {name for name in SOURCES if name.endswith("mnist")} - {"mnist", "fmnist"} == flat - {"chestmnist"}


def test_multi_label_medmnist_is_refused_by_the_configuration() -> None:
    with pytest.raises(ValidationError, match="chestmnist is multi-label"):
        CONFIG.validate_python({"name": "chestmnist"})


def test_published_constants_only_where_there_are_some() -> None:
    with pytest.raises(ValidationError, match="no constants were published for digits"):
        CONFIG.validate_python({"name": "digits", "normalise": "published"})


@pytest.mark.parametrize(
    "options", [{"pad": 0}, {"normalise": "z"}, {"limit": 5}, {"name": "npz", "file": "a", "sha256": "12"}]
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CONFIG.validate_python({"name": "digits", **options})


def test_digits_split_is_stratified_and_the_same_for_every_seed() -> None:
    pool = pool_of("digits", normalise="none")
    assert pool.x.shape == (1797, 1, 8, 8)
    assert (pool.x.min(), pool.x.max()) == (0, 1)
    all_counts = np.bincount(pool.y)
    np.testing.assert_array_equal(np.bincount(pool.y[pool.num_train :]), all_counts // 5)
    again = load(CONFIG.validate_python({"name": "digits", "normalise": "none"}), seed=7)
    np.testing.assert_array_equal(pool.x, again.x)


def test_fingerprint_tells_normalisation_and_content() -> None:
    pools = [pool_of("digits"), pool_of("digits", normalise="half"), pool_of("digits", pad=10)]
    assert len({pool.fingerprint for pool in pools}) == 3
    assert pool_of("digits").fingerprint == pools[0].fingerprint


# Files of one's own, with MedMNIST's keys.


def arrays(**other: np.ndarray | None) -> dict[str, np.ndarray]:
    """Three classes, two training images and one test image each; `other` replaces (None removes) arrays."""
    pixels = np.arange(9 * 4 * 5 * 3, dtype=np.uint8).reshape(9, 4, 5, 3)
    base: dict[str, np.ndarray | None] = {
        "train_images": pixels[:6],
        "train_labels": np.array([0, 1, 2, 0, 1, 2]),
        "test_images": pixels[6:],
        "test_labels": np.array([2, 1, 0]),
    }
    return {key: value for key, value in (base | other).items() if value is not None}


def npz(folder: Path, **other: np.ndarray | None) -> Path:
    path = folder / "own.npz"
    np.savez(path, **arrays(**other))  # type: ignore[arg-type]
    return path


def test_npz_is_read_channels_first(tmp_path: Path) -> None:
    pool = pool_of("npz", file=npz(tmp_path), normalise="none")
    own = arrays()
    assert pool.x.shape == (9, 3, 4, 5)
    np.testing.assert_array_equal(pool.x[0, 2], (own["train_images"][0, :, :, 2] / 255).astype(np.float32))
    assert pool.y.tolist() == [0, 1, 2, 0, 1, 2, 2, 1, 0]
    assert (pool.y.dtype, pool.num_train, pool.num_classes) == (np.int64, 6, 3)


def test_npz_labels_may_be_a_column_and_images_grey_or_float(tmp_path: Path) -> None:
    own = arrays()
    column = npz(tmp_path, train_labels=own["train_labels"][:, None].astype(np.uint8))
    assert pool_of("npz", file=column).y.shape == (9,)
    grey = {key: own[key][..., 0] / 100 for key in ("train_images", "test_images")}
    pool = pool_of("npz", file=npz(tmp_path, **grey), normalise="none")
    assert pool.x.shape == (9, 1, 4, 5)
    np.testing.assert_allclose(pool.x[:6, 0], grey["train_images"], rtol=1e-6)


def test_npz_validation_split_is_appended_to_training_or_dropped(tmp_path: Path) -> None:
    own = arrays()
    path = npz(tmp_path, val_images=own["test_images"][:1], val_labels=np.array([1]))
    appended = pool_of("npz", file=path)
    assert (appended.num_train, appended.y.tolist()) == (7, [0, 1, 2, 0, 1, 2, 1, 2, 1, 0])
    assert pool_of("npz", file=path, val_split="drop").num_train == 6


def test_npz_checksum_is_compared(tmp_path: Path) -> None:
    path = npz(tmp_path)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert pool_of("npz", file=path, sha256=right.upper()).num_train == 6
    with pytest.raises(DataError, match=f"sha256 expected {'0' * 64}, found {right}"):
        pool_of("npz", file=path, sha256="0" * 64)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"train_labels": np.array([0, 1, 2])}, "6 train_images but 3 train_labels"),
        ({"train_labels": np.array([0, 1, 3, 0, 1, 3])}, "1 of 4 classes have no training image: 2"),
        ({"train_labels": np.array([0, 1, 2, 0, 1, -1])}, "label -1 of training image 5 is outside 0..2"),
        ({"test_labels": np.array([2, 5, 0])}, "label 5 of test image 1 is outside 0..2"),
        ({"label_names": np.array(["a", "b"])}, "label 2 of training image 2 is outside 0..1"),
        ({"train_labels": np.zeros((6, 14), int)}, r"train_labels is int64 \[6, 14\].*multi-label"),
        ({"train_labels": np.zeros(6)}, r"train_labels is float64 \[6\]. Labels must be integers"),
        ({"train_images": np.zeros((6, 3, 32, 32), np.uint8)}, "transpose channels-first arrays first"),
        ({"train_images": np.zeros((6, 4, 5, 3), np.int64)}, "train_images is int64. Images must be uint8"),
        ({"test_images": np.zeros((3, 4, 4, 3), np.uint8)}, r"test_images are uint8 \[3, 4, 4\]"),
        ({"test_images": None}, "no array test_images"),
        (
            {"train_images": np.full((6, 4, 5, 3), np.nan), "test_images": np.zeros((3, 4, 5, 3))},
            "NaN or infinite",
        ),
        (
            {"test_images": np.zeros((0, 4, 5, 3), np.uint8), "test_labels": np.zeros(0, int)},
            "the test split is empty",
        ),
        ({"val_images": np.zeros((1, 4, 5, 3), np.uint8)}, "val_images without val_labels"),
    ],
)
def test_npz_of_the_wrong_form_says_what_is_wrong(
    tmp_path: Path, other: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        pool_of("npz", file=npz(tmp_path, **other))


def test_medmnist_files_are_checked_and_the_validation_split_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medmnist = pytest.importorskip("medmnist")
    own = arrays()
    labels = {key: own[key][:, None] % 2 for key in ("train_labels", "test_labels")}
    val = {"val_images": own["test_images"][:1], "val_labels": np.array([[1]])}
    path = npz(tmp_path, **labels, **val).rename(tmp_path / "breastmnist.npz")
    with pytest.raises(DataError, match=r"breastmnist\.npz is corrupt: md5 expected 750601b1f35ba3300ea9"):
        pool_of("breastmnist", root=tmp_path)
    found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setitem(medmnist.INFO["breastmnist"], "MD5", found)
    pool = pool_of("breastmnist", root=tmp_path)
    assert (pool.num_train, pool.num_classes, pool.y.shape) == (6, 2, (9,))


# torchvision's sets, from files of their own form with checksums replaced.


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def test_cifar_pickles_are_read_channels_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3 * 32 * 32), np.uint8)
    for file, content in (
        ("batch", {"data": pixels[:10], "labels": list(range(10))}),
        ("test", {"data": pixels[10:], "labels": list(range(10))}),
        ("meta", {"label_names": list("abcdefghij")}),
    ):
        (folder / file).write_bytes(pickle.dumps(content))
    monkeypatch.setattr(CIFAR10, "train_list", [["batch", md5(folder / "batch")]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test", md5(folder / "test")]])
    monkeypatch.setattr(
        CIFAR10, "meta", {"filename": "meta", "key": "label_names", "md5": md5(folder / "meta")}
    )
    pool = pool_of("cifar10", root=tmp_path, download=False, normalise="none")
    np.testing.assert_array_equal(
        pool.x, (pixels.reshape(20, 3, 32, 32) / 255).astype(np.float32), strict=True
    )
    (folder / "test").write_bytes(b"not a pickle")
    with pytest.raises(DataError, match="test is corrupt: md5 expected"):
        pool_of("cifar10", root=tmp_path, download=False)


def test_svhn_is_downloaded_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digit 0 is labelled 10 in the files."""
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    files = {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}.mat"
        pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 10), np.uint8)
        savemat(path, {"X": pixels, "y": np.arange(1, 11)[:, None]})
        files[split] = ["", path.name, md5(path)]
    monkeypatch.setattr(SVHN, "split_list", files)
    monkeypatch.setattr(
        SVHN, "download", lambda self: shutil.copy(tmp_path / self.filename, Path(self.root) / self.filename)
    )
    pool = pool_of("svhn", root=tmp_path / "cache", normalise="none")
    assert pool.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 2
    np.testing.assert_array_equal(pool.x[3], (pixels[..., 3].transpose(2, 0, 1) / 255).astype(np.float32))


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def test_truncated_idx_file_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (10, 28, 28), np.uint8)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(pixels))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.arange(10, dtype=np.uint8)))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in raw.iterdir()}
    monkeypatch.setitem(torchvision_sets._IDX_SHA256, "MNIST", sums)
    assert pool_of("mnist", root=tmp_path, download=False).x.shape == (20, 1, 28, 28)

    victim = raw / "t10k-images-idx3-ubyte"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(DataError) as error:
        pool_of("mnist", root=tmp_path, download=False)
    assert f"{victim} is corrupt: sha256 expected {sums[victim.name]}" in str(error.value)
    assert "from torchvision.datasets import MNIST" in str(error.value)


@pytest.mark.parametrize(("name", "mean", "sd"), [("mnist", 0.13066, 0.30811), ("fmnist", 0.28604, 0.35302)])
def test_real_idx_sets(real_data: Path, name: str, mean: float, sd: float) -> None:
    pool = pool_of(name, root=real_data, download=False, normalise="none")
    assert (len(pool.y), pool.num_train) == (70_000, 60_000)
    train = pool.x[: pool.num_train].astype(np.float64)
    assert (round(train.mean(), 5), round(train.std(), 5)) == (mean, sd)


@pytest.mark.parametrize(
    ("file", "num_train", "num_classes"),
    [("cifar10/cifar10_24k_5k.npz", 24_000, 10), ("cifar100/cifar100_10k_2k.npz", 10_000, 100)],
)
def test_real_cifar_subsets(real_data: Path, file: str, num_train: int, num_classes: int) -> None:
    pool = pool_of("npz", file=real_data / file)
    assert pool.x.shape == (num_train * 6 // 5, 3, 32, 32)
    assert (pool.num_train, pool.num_classes) == (num_train, num_classes)
    train = pool.x[:num_train].astype(np.float64)
    np.testing.assert_allclose(train.mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(train.std((0, 2, 3)), 1, atol=1e-6)
