"""Reading, overriding, checking and saving configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypfl.configuration import expand, load, to_dict, to_yaml
from raypfl.errors import ConfigError
from raypfl.settings import ParticipationConfig


def base(**changes: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "method": [{"name": "local"}, {"name": "fedavg"}, {"name": "fedamp"}, {"name": "diversifed"}],
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "num_clients": 10, "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [16]},
        **changes,
    }


def refusal(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    return str(caught.value)


def names(config: Any) -> list[str]:
    return [method.name for method in config.method]


def test_overrides_are_yaml_at_dotted_keys() -> None:
    config = load(
        base(), ["seed=[1,2]", "training={optimizer: {name: sgd, lr: 1e-2}}", "engine.name=ray", "name=null"]
    )
    assert config.seed == (1, 2)
    assert config.training.optimizer.lr == 0.01
    assert config.engine.name == "ray"
    assert config.name is None


def test_the_source_is_not_changed() -> None:
    source = base()
    load(source, ["partition.alpha=0.1", "method.name=diversifed", "method.tau=0.9"])
    assert source == base()


def test_method_name_keeps_the_entries_of_that_name_with_their_options() -> None:
    source = base(method=[{"name": "fedavg"}, {"name": "diversifed", "tau": 0.7}, {"name": "diversifed"}])
    config = load(source, ["method.name=diversifed"])
    assert [(method.name, method.tau) for method in config.method][0] == ("diversifed", 0.7)
    assert names(config) == ["diversifed", "diversifed"]


def test_method_name_that_is_not_listed_replaces_the_list() -> None:
    assert names(load(base(method=[{"name": "fedavg"}, {"name": "local"}]), ["method.name=fedamp"])) == [
        "fedamp"
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_a_method_option_goes_to_the_entries_that_have_it(order: int) -> None:
    config = load(base(), ["method.tau=0.9"])
    assert names(config) == ["local", "fedavg", "fedamp", "diversifed"]
    assert config.method[3].tau == 0.9
    narrowed = load(base(), ["method.name=diversifed", "method.tau=0.9"][::order])
    assert [(method.name, method.tau) for method in narrowed.method] == [("diversifed", 0.9)]


def test_a_method_option_that_no_entry_has() -> None:
    text = refusal(base(), "method.tauu=0.9")
    assert "method.tauu" in text
    assert "Did you mean tau?" in text


@pytest.mark.parametrize(
    ("key", "value", "path", "nearest"),
    [
        ("ronuds", 3, "ronuds", "rounds"),
        ("training", {"epocs": 3}, "training.epocs", "epochs"),
        (
            "training",
            {"optimizer": {"name": "sgd", "momentun": 0.9}},
            "training.optimizer.momentun",
            "momentum",
        ),
        ("method", {"name": "diversifed", "taw": 0.9}, "method.taw", "tau"),
        ("method", [{"name": "local"}, {"name": "diversifed", "taw": 0.9}], "method[1].taw", "tau"),
        ("partition", {"name": "dirichlet", "alphaa": 0.3}, "partition.alphaa", "alpha"),
        ("model", {"name": "mlp", "hiddenn": [16]}, "hiddenn", "hidden"),
        ("engine", {"num_actor": 2}, "engine.num_actor", "num_actors"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(
    key: str, value: Any, path: str, nearest: str
) -> None:
    line = next(line for line in refusal(base(**{key: value})).splitlines() if path in line)
    assert f"Did you mean {nearest}?" in line


def test_the_nearest_key_is_one_of_the_chosen_method() -> None:
    """Other methods know `tau`; FedAvg does not, so it must not be proposed."""
    text = refusal(base(method={"name": "fedavg", "tau": 0.9}))
    assert "method.tau: unknown key. Known: name." in text


@pytest.mark.parametrize(
    ("key", "name", "nearest"),
    [("method", "fedagv", "fedavg"), ("partition", "dirichet", "dirichlet"), ("model", "lenet", "lenet5")],
)
def test_an_unknown_name_is_answered_with_the_nearest_known_one(key: str, name: str, nearest: str) -> None:
    text = refusal(base(), f"{key}={{name: {name}}}")
    assert re.search(rf"{key}\.name = .{name}.", text)
    assert f"Did you mean {nearest}?" in text


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rounds=0", "rounds = 0: must be greater than 0"),
        ("rounds=many", 'rounds = "many": must be a valid integer'),
        ("rounds='3'", 'rounds = "3": must be a number, not text'),
        ("rounds=true", "rounds = true: must be a number, not true or false"),
        ("training.batch_size=0", "training.batch_size = 0: must be greater than or equal to 1"),
        ("training.optimizer={name: adam, lr: -1}", "training.optimizer.lr = -1: must be greater than"),
        ("engine.block=some", "engine.block = \"some\": must be a valid integer or 'auto'"),
        ("engine.name=rya", "engine.name = \"rya\": must be 'local' or 'ray'"),
        ("evaluation.points=[pre, mid]", "evaluation.points[1] = \"mid\": must be 'pre' or 'post'"),
        ("evaluation.points=[]", "evaluation.points = []"),
        ("evaluation.models=[global, global]", "must not name anything twice"),
        ("method.tau=high", 'method[3].tau = "high": must be a valid number'),
        ("seed=-1", "seed = -1: must be greater than or equal to 0"),
        ("seed=[1,1]", "seed = [1, 1] names a seed twice"),
        ("method=fedavg", 'method = "fedavg": must be a mapping'),
        ("name=../elsewhere", "must be a folder below storage_path"),
        ("resources.num_gpus_per_actor=1.5", "must be a fraction of one GPU (at most 1) or a whole number"),
        ("resources={device: cpu, num_gpus_server: 1}", "leaves the GPUs that are asked for idle"),
        ("participation={fraction: 0.1, count: 3}", "give exactly one of fraction and count"),
        ("storage_path=3", "storage_path = 3: must be a path"),
        ("participation={}", "participation: give exactly one of fraction and count"),
        ("engine={num_actors: 2, clients_per_actor: 5}", "at most one of num_actors and clients_per_actor"),
        ("engine.num_actors=11", "engine.num_actors = 11 is more than the 10 clients there are"),
        ("evaluation.clients=11", "evaluation.clients = 11 is more than the 10 clients there are"),
        ("participation={count: 11}", "participation.count = 11 is more than the 10 clients there are"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_what_is_allowed(override: str, line: str) -> None:
    text = refusal(base(), override)
    assert line in text
    assert len(text.splitlines()) == 2, "the source, and one line"


def test_every_wrong_key_is_reported_at_once() -> None:
    text = refusal(base(rounds=0, sede=1), "training.epochs=0")
    assert all(key in text for key in ("rounds = 0", "sede: unknown key", "training.epochs = 0"))


def test_missing_keys_are_named() -> None:
    text = refusal({"data": {}})
    assert "rounds: this key is required." in text
    assert "data.name: this key is required. Known: " in text


def test_a_fraction_that_selects_nobody() -> None:
    source = base(partition={"name": "dirichlet", "num_clients": 100, "alpha": 0.3})
    assert (
        "participation.fraction = 0.005 of 100 clients selects 0 participants. "
        "Use a fraction of at least 0.01, or set participation.count."
    ) in refusal(source, "participation.fraction=0.005")


@pytest.mark.parametrize(
    ("num_clients", "fraction", "participants"),
    [(100, 0.29, 29), (100, 0.01, 1), (40, 0.99, 39), (3, 1.0, 3)],
)
def test_a_fraction_is_rounded_down_but_not_by_binary_arithmetic(
    num_clients: int, fraction: float, participants: int
) -> None:
    """0.29 * 100 is 28.999999999999996 in floating point."""
    assert ParticipationConfig(fraction=fraction).participants(num_clients) == participants


@pytest.mark.parametrize("num_clients", [3, 7, 97, 1000])
def test_the_fraction_that_the_message_advises_selects_somebody(num_clients: int) -> None:
    with pytest.raises(ConfigError) as caught:
        ParticipationConfig(fraction=1e-6).participants(num_clients)
    advised = re.search(r"at least ([0-9.]+),", str(caught.value))
    assert advised is not None
    assert ParticipationConfig(fraction=float(advised[1])).participants(num_clients) == 1


def test_a_switched_name_does_not_drop_the_old_options() -> None:
    text = refusal(base(), "partition.name=iid")
    assert "partition.alpha: unknown key" in text
    assert "partition={name: iid} drops them" in text


@pytest.mark.parametrize("override", ["rounds", "=3", "training..epochs=3", "rounds=[1", "rounds.x=3"])
def test_a_malformed_override_is_quoted(override: str) -> None:
    assert override.replace('"', "") in refusal(base(), override)


def test_a_key_that_is_overridden_twice() -> None:
    assert "rounds is given twice" in refusal(base(), "rounds=3", "rounds=4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds: 3\nmethod: [", "line 2: not valid YAML"),
        ("rounds: 3\nrounds: 4\n", "line 2: not valid YAML: the key 'rounds' stands here twice"),
        ("- a\n- b\n", "must be a mapping"),
    ],
)
def test_an_unreadable_file_is_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    refused = refusal(path)
    assert str(path) in refused
    assert message in refused


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none.yaml'}: cannot be read: No such file" in refusal(tmp_path / "none.yaml")


def test_numbers_and_dates_in_a_file_are_what_they_look_like(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(base()) + "name: 2024-07-23\ntraining: {optimizer: {name: adam, lr: 1e-3}}\n"
    )
    config = load(path)
    assert config.name == "2024-07-23"
    assert config.training.optimizer.lr == 0.001


def test_the_resolved_configuration_gives_itself_back(tmp_path: Path) -> None:
    config = load(base(name="1e5"), ["seed=[1,2]", "method.tau=0.9"])
    assert load(to_dict(config)) == config
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(path) == config


def test_a_run_can_be_run_again_from_its_own_configuration(tmp_path: Path) -> None:
    for run in expand(load(base(), ["seed=[1,2]"])).values():
        path = tmp_path / "config.yaml"
        path.write_text(to_yaml(run))
        assert list(expand(load(path)).values()) == [run]


def test_expanding_gives_every_method_with_every_seed() -> None:
    runs = expand(load(base(method=[{"name": "fedavg"}, {"name": "local"}]), ["seed=[3,1]"]))
    assert list(runs) == ["fedavg-seed3", "fedavg-seed1", "local-seed3", "local-seed1"]
    assert [(run.method.name, run.seed) for run in runs.values()] == [
        ("fedavg", 3),
        ("fedavg", 1),
        ("local", 3),
        ("local", 1),
    ]


def test_a_method_listed_twice_is_told_apart_by_what_differs() -> None:
    method = [{"name": "diversifed", "tau": tau} for tau in (0.5, 0.75)] + [{"name": "fedavg"}]
    labels = list(expand(load(base(method=method))))
    assert labels == ["diversifed-tau0.5-seed0", "diversifed-tau0.75-seed0", "fedavg-seed0"]


def test_three_entries_differ_from_one_another_in_their_own_way() -> None:
    method = [
        {"name": "diversifed"},
        {"name": "diversifed", "form": "balanced"},
        {"name": "diversifed", "tau": 0.9},
    ]
    assert len(expand(load(base(method=method), ["seed=[1,2]"]))) == 6


def test_a_method_listed_twice_with_the_same_options_is_refused() -> None:
    assert "method lists fedavg twice" in refusal(base(method=[{"name": "fedavg"}, {"name": "fedavg"}]))
