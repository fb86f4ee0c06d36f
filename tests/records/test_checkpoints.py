import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from raypfl.errors import CheckpointError, StorageError
from raypfl.records.checkpoints import (
    HUB,
    begin,
    commit,
    latest,
    prune,
    read_hub,
    read_manifest,
    read_rows,
    write_part,
)
from raypfl.records.manifest import Manifest, check_same

CONFIG = {
    "name": "run",
    "rounds": 10,
    "seed": 1,
    "method": {"name": "diversifed", "tau": 0.5},
    "engine": {"name": "local", "num_actors": None, "block": 4},
    "resources": {"device": "cpu", "num_gpus_per_actor": 0.0},
}


class State(NamedTuple):
    w: Tensor
    seen: Tensor
    steps: Tensor


class Hub(NamedTuple):
    w: Tensor
    scale: Tensor


class Nothing(NamedTuple):
    pass


def manifest(round=10, **changes):
    return Manifest(
        round=round,
        config={**CONFIG, **changes},
        block=4,
        width=1,
        threads=1,
        partition="fingerprint",
        data="content",
        device="cpu",
    )


def state(ids):
    """Rows that say whose they are, in three dtypes; -0.0 and NaN must survive too."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    w = ids[:, None] + torch.tensor([0.1, -0.0, math.nan])
    return State(w, ids % 2 == 0, torch.stack((ids, ids**2), 1))


def save(folder, parts, round=10, hub=None):
    building = begin(folder, round)
    hub = Hub(torch.arange(3.0), torch.tensor(2.5, dtype=torch.float64)) if hub is None else hub
    written = [write_part(building, HUB, hub)]
    written += [
        write_part(building, f"state-{number}", state(ids), torch.tensor(ids, dtype=torch.int64))
        for number, ids in enumerate(parts)
    ]
    return commit(building, manifest(round), written)


def same_bits(left, right):
    def content(tensor):
        return tensor.dtype, tensor.shape, tensor.contiguous().numpy().tobytes()

    return type(left) is type(right) and all(
        content(a) == content(b) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    "parts",
    [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]], [[5, 1], [], [4, 0, 3], [2]]],
    ids=["one", "two", "uneven"],
)
def test_rows_do_not_depend_on_how_parts_were_cut(tmp_path, parts):
    folder = save(tmp_path, parts)
    for ids in ([0, 1, 2, 3, 4, 5], [4, 2, 5], [3], []):
        wanted = torch.tensor(ids, dtype=torch.int64)
        assert same_bits(read_rows(folder, wanted, State), state(wanted))


def test_hub_of_any_shape_comes_back(tmp_path):
    hub = Hub(torch.zeros(2, 0, 3, dtype=torch.bool), torch.tensor(7))
    assert same_bits(read_hub(save(tmp_path, [[0]], hub=hub), Hub), hub)


def test_tuples_without_fields(tmp_path):
    building = begin(tmp_path, 1)
    parts = [
        write_part(building, HUB, Nothing()),
        write_part(building, "state-0", Nothing(), torch.tensor([3, 4])),
    ]
    folder = commit(building, manifest(1), parts)
    assert read_hub(folder, Nothing) == Nothing()
    assert read_rows(folder, torch.tensor([4]), Nothing) == Nothing()
    with pytest.raises(CheckpointError, match=r"no rows of clients \[5\]"):
        read_rows(folder, torch.tensor([5]), Nothing)


def test_tensors_of_every_layout(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)

    class Views(NamedTuple):
        narrow: Tensor  # columns of a wider matrix
        rest: Tensor  # the other columns, in the same storage
        transposed: Tensor
        expanded: Tensor
        twice: Tensor  # the same tensor again
        grad: Tensor

    views = Views(
        base[:, :2],
        base[:, 2:],
        torch.arange(8.0).reshape(2, 4).T,
        torch.ones(1, 3).expand(4, 3),
        base[:, :2],
        torch.ones(4, 1, requires_grad=True),
    )
    building = begin(tmp_path, 1)
    whole = Views(base[:2], base[2:], base, base.T, base, base)
    parts = [write_part(building, HUB, whole), write_part(building, "state-0", views, torch.arange(4))]
    assert (building / "state-0.safetensors").stat().st_size < 1500
    folder = commit(building, manifest(1), parts)
    assert same_bits(read_hub(folder, Views), whole)
    detached = Views(*(view.detach() for view in views))
    assert same_bits(read_rows(folder, torch.arange(4), Views), detached)


def test_killed_before_the_manifest_leaves_the_previous_one_in_force(tmp_path, monkeypatch):
    previous = save(tmp_path, [[0, 1]], round=5)

    building = begin(tmp_path, 10)
    part = write_part(building, "state-0", state([0, 1]), torch.tensor([0, 1]))
    assert latest(tmp_path) == previous

    def killed(*arguments):
        raise KeyboardInterrupt

    # Before the manifest, and between it and the folder's name.
    for moment in ("raypfl.records.checkpoints.write_text", "os.rename"):
        with monkeypatch.context() as patch:
            patch.setattr(moment, killed)
            with pytest.raises(KeyboardInterrupt):
                commit(building, manifest(10), [part])
        assert latest(tmp_path) == previous
    assert read_manifest(previous).round == 5

    newer = save(tmp_path, [[0, 1]], round=10)
    assert latest(tmp_path) == newer
    assert sorted(tmp_path.iterdir()) == [previous, newer]


def test_a_named_folder_without_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "round-000010").mkdir()
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_numbers_order_rounds_and_prune_keeps_the_newest(tmp_path):
    folders = [save(tmp_path, [[0]], round=round) for round in (2, 10, 9)]
    assert latest(tmp_path) == folders[1]
    prune(tmp_path, keep=2)
    assert sorted(tmp_path.iterdir()) == [folders[2], folders[1]]


def test_the_same_round_again_replaces(tmp_path):
    save(tmp_path, [[0, 1]])
    folder = save(tmp_path, [[0], [1], [2]])
    assert len(read_manifest(folder).parts) == 4
    assert list(tmp_path.iterdir()) == [folder]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (flip_a_bit, "SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"\d+ bytes instead of \d+"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["bit", "cut", "gone"],
)
def test_a_damaged_part_is_found(tmp_path, damage, found):
    folder = save(tmp_path, [[0, 1], [2]])
    damage(folder / "state-1.safetensors")
    with pytest.raises(CheckpointError, match=rf"state-1\.safetensors.*{found}"):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}'])
def test_a_damaged_manifest_is_found(tmp_path, text):
    folder = save(tmp_path, [[0]])
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is not valid"):
        read_manifest(folder)


def test_a_changed_config_in_the_manifest_is_found(tmp_path):
    path = save(tmp_path, [[0]]) / "manifest.json"
    path.write_text(path.read_text().replace('"tau": 0.5', '"tau": 0.6'))
    with pytest.raises(CheckpointError, match="its config has SHA-256"):
        read_manifest(path.parent)


def test_manifest_comes_back_equal(tmp_path):
    building = begin(tmp_path, 3)
    part = write_part(building, "state-0", state([0]), torch.tensor([0]))
    written = manifest(3, limit=math.inf, list=[1, 2.5, None])
    folder = commit(building, written, [part])
    assert read_manifest(folder) == written.model_copy(update={"parts": (part,)})


def test_a_part_on_another_machine_is_refused(tmp_path):
    building = begin(tmp_path, 3)
    part = write_part(building, "state-0", state([0]), torch.tensor([0]))
    (building / part.file).unlink()
    with pytest.raises(CheckpointError, match="every node shares"):
        commit(building, manifest(3), [part])
    assert latest(tmp_path) is None


def test_unwritable_storage(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        begin(tmp_path / "file" / "checkpoints", 1)
    with pytest.raises(StorageError, match=r"state-0\.safetensors"):
        write_part(tmp_path / "absent", "state-0", state([0]), torch.tensor([0]))


def test_other_fields_are_refused(tmp_path):
    folder = save(tmp_path, [[0]])
    with pytest.raises(CheckpointError, match=r"fields \['seen', 'steps', 'w'\], but Hub has"):
        read_rows(folder, torch.tensor([0]), Hub)
    with pytest.raises(CheckpointError, match="but State has"):
        read_hub(folder, State)


def test_check_same_lists_what_differs():
    now = {
        **CONFIG,
        "seed": 2,
        "method": {"name": "diversifed", "tau": 0.9, "rho": 1.0},
        "engine": {"name": "ray", "num_actors": 8, "block": 4},
        "resources": {},
        "rounds": 500,
    }
    with pytest.raises(CheckpointError) as caught:
        check_same("the checkpoint", CONFIG, now)
    listed = [line.strip() for line in str(caught.value).splitlines() if " -> " in line]
    assert listed[1:] == ["method.rho: (absent) -> 1.0", "method.tau: 0.5 -> 0.9", "seed: 1 -> 2"]


def test_check_same_allows_what_changes_no_number():
    engine = {"name": "ray", "num_actors": 8, "block": 4}
    elsewhere = {**CONFIG, "name": "other", "rounds": 20, "engine": engine, "checkpoint": {"every": 1}}
    check_same("the run", CONFIG, elsewhere)
    check_same("the run", {**CONFIG, "list": [1, 2]}, {**elsewhere, "list": (1, 2)})
    with pytest.raises(CheckpointError, match="rounds: 10 -> 20"):
        check_same("the run", CONFIG, elsewhere, may_differ=["name", "engine.*", "checkpoint.*"])
