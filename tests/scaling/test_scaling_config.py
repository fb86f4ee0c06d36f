"""Files of scaling studies: which points they have, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypfl.engine import planning
from raypfl.engine.placement import Node
from raypfl.errors import ConfigError
from raypfl.scaling.checks import check
from raypfl.scaling.config import read

BASE: dict[str, Any] = {
    "rounds": 2,
    "method": {"name": "diversifed"},
    "data": {"name": "digits"},
    "partition": {
        "name": "dirichlet",
        "num_clients": 4,
        "train_size": 20,
        "test_size": 10,
        "when_short": "replace",
    },
    "model": {"name": "mlp", "hidden": [8]},
}


def with_studies(**studies: Any) -> dict[str, Any]:
    return {**BASE, "scale": {"studies": studies}}


def test_all_combinations_are_points() -> None:
    scaling = read(
        with_studies(
            clients={"over": {"partition.num_clients": [4, 8], "model.hidden": [[8], [16, 8]]}},
            kinds={
                "fixed": {"rounds": 3},
                "cases": {"small": {"model": {"name": "linear"}}, "mean": {"method.name": "fedavg"}},
            },
        )
    )
    assert [(point.name, point.settings) for point in scaling.points] == [
        ("clients-001", "num_clients=4 hidden=8"),
        ("clients-002", "num_clients=4 hidden=16x8"),
        ("clients-003", "num_clients=8 hidden=8"),
        ("clients-004", "num_clients=8 hidden=16x8"),
        ("kinds-001", "small"),
        ("kinds-002", "mean"),
    ]
    configs = [point.config for point in scaling.points]
    assert [config.partition.num_clients for config in configs] == [4, 4, 8, 8, 4, 4]
    assert [config.model.name for config in configs] == ["mlp"] * 4 + ["linear", "mlp"]
    assert [config.method.name for config in configs] == ["diversifed"] * 5 + ["fedavg"]
    assert [config.rounds for config in configs] == [2, 2, 2, 2, 3, 3]


def test_overrides_go_to_all_points_or_to_the_section() -> None:
    source = with_studies(
        clients={"over": {"partition.num_clients": [4, 8]}}, models={"over": {"model.name": ["mlp"]}}
    )
    scaling = read(source, ["rounds=7", "name=mine", "scale.warm_up=1", "scale.only=[models]"])
    assert {point.config.rounds for point in scaling.points} == {7}
    assert scaling.name == "mine"
    assert scaling.scale.warm_up == 1
    assert [point.study for point in scaling.chosen] == ["models"]
    assert len(scaling.points) == 3
    assert read(source).name == "scale"


def test_values_can_be_given_on_the_command_line() -> None:
    source = with_studies(a={"over": {"partition.num_clients": [4, 8]}})
    (point,) = read(source, ["scale.studies.a.over.partition.num_clients=[5]"]).points
    assert (point.settings, point.config.partition.num_clients) == ("num_clients=5", 5)


def test_a_file_gives_the_folder_its_name(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(with_studies(a={"over": {"seed": [0, 1]}})))
    assert read(path).name == "scale-small"


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({"studies": {"a": {"ovr": {}}}}, r"scale\.studies\.a\.ovr: unknown key\. Did you mean over\?"),
        ({"studies": {"a": {"over": {}}}}, r"scale\.studies\.a: give over"),
        ({"studies": {"a": {"over": {"rounds": []}}}}, "rounds has no values"),
        ({"studies": {"a": {"over": {"rounds": [2, 2]}}}}, r"rounds has a value twice: \[2, 2\]"),
        ({"studies": {"a": {"over": {"rounds": [2]}, "fixed": {"rounds": 3}}}}, "in over and in fixed"),
        ({"studies": {"a": {"cases": {"a b": {}}}}}, "label 'a b' must be one word"),
        ({"studies": {"a/b": {"over": {"rounds": [2]}}}}, "not fit for a file's name"),
        ({"studies": {}}, r"scale\.studies"),
        ({"studies": {"a": {"over": {"rounds": [2]}}}, "only": ["b"]}, "no study 'b'. Known: a"),
        ({"studies": {"a": {"over": {"rounds": [2]}}}, "warm_up": 0}, r"scale\.warm_up = 0"),
        (
            {"studies": {"a": {"over": {"partition.num_client": [5]}}}},
            r"study a, num_client=5:\n.*partition\.num_client: unknown key\. Did you mean num_clients\?",
        ),
        (
            {"studies": {"a": {"over": {"participation.count": [4, 5]}}}},
            r"count=5:\n.*more than the 4 clients",
        ),
        ({"studies": {"a": {"over": {"seed": [[0, 1]]}}}}, "one method with one seed"),
    ],
)
def test_a_wrong_section_is_refused(scale: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read({**BASE, "scale": scale})


def test_a_file_without_studies_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no section scale"):
        read(BASE)


def test_storage_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage_path = s3://bucket/runs: a study measures this machine"):
        read(with_studies(a={"over": {"rounds": [2]}}), ["storage_path=s3://bucket/runs"])


def test_a_varied_key_cannot_be_given_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="rounds is given on the command line, and study a has it, too"):
        read(with_studies(a={"over": {"rounds": [2, 3]}}), ["rounds=5"])


@pytest.mark.parametrize(
    ("study", "message"),
    [
        (
            {"fixed": {"partition": {"name": "iid"}}, "over": {"partition.num_clients": [10, 5000]}},
            r"1 point\(s\).*num_clients=5000: partition iid of digits: ",
        ),
        (
            {"fixed": {"engine.name": "ray", "engine.block": 1}, "over": {"engine.num_actors": [2, 3]}},
            r"1 point\(s\).*num_actors=3: the run asks for 3 client hosts with 1 CPU each",
        ),
        (
            {"fixed": {"model.hidden": [4000]}, "over": {"partition.num_clients": [4, 3000]}},
            r"1 point\(s\).*num_clients=3000: needs at least .* of memory, and there are 2.1 GB",
        ),
        (
            {"measure": "costs", "fixed": {"engine.name": "ray"}, "over": {"rounds": [2]}},
            r"rounds=2: engine\.name = ray: costs are counted in one process",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, study: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(planning, "this_machine", lambda: Node(2, 0, 2**31))
    monkeypatch.setattr(planning, "attached", lambda: False)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check(read(with_studies(a=study)).points)
