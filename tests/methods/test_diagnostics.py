"""What anchored methods say of their server step, on three models that stand on a line."""

import math

import pytest
import torch

import raypfl
from raypfl.methods.contract import Plan
from raypfl.methods.diversifed import Config, DiversiFed
from raypfl.methods.fedamp import Config as FedAMPConfig
from raypfl.methods.fedamp import FedAMP
from raypfl.methods.published import Hub

# Models at 0, 1 and 10: distances 1, 9 and 10. With tau = 1 the net form is the balanced one.
LINE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [10.0, 0.0]], dtype=torch.float64)


def matrix_of(pairs, size=3):
    found = torch.full((size, size), torch.nan, dtype=torch.float64)
    found[pairs.receivers, pairs.sources] = pairs.values.double()
    return found


def diagnose(method):
    plan = Plan(2, torch.arange(3), torch.ones(3, dtype=torch.int64))
    down = method.download(None, Hub(LINE), plan)
    return method.diagnose(None, Hub(LINE), plan, down), down


def test_numbers_of_three_models():
    found, down = diagnose(DiversiFed(Config(tau=1.0, eta=1.0)))
    assert (found["distance_min"], found["distance_median"], found["distance_max"]) == (1.0, 9.0, 10.0)
    # Each model is pulled to its nearer neighbour (0-1, 1-0, 10-1) and pushed from the other one.
    assert found["pulled_distance"] == pytest.approx((1 + 1 + 9) / 3)
    assert found["pushed_distance"] == pytest.approx((10 + 9 + 10) / 3)
    assert found["pushed"] == 1.0
    assert found["weight_norm_max"] == 10.0
    shift = float((down.anchor - LINE).norm(dim=1).mean())
    assert found["anchor_shift"] == pytest.approx(shift)
    assert found["anchor_shift_relative"] == pytest.approx(shift / 9.0)

    def two(gap):  # exp(entropy) of a softmax over two distances that differ by `gap`
        p = 1 / (1 + math.exp(-gap))
        return math.exp(-p * math.log(p) - (1 - p) * math.log(1 - p))

    assert found["farthest"] == pytest.approx((two(9) + two(8) + two(1)) / 3)


def test_attraction_alone_pushes_nobody():
    found, _ = diagnose(FedAMP(FedAMPConfig(alpha=1.0, sigma=100.0)))
    assert found["pushed"] == 0.0
    assert math.isnan(found["pushed_distance"])
    # The middle model has the largest row sum: exp(-1/100) + exp(-81/100), over sigma.
    assert found["self_weight_min"] == pytest.approx(1 - (math.exp(-0.01) + math.exp(-0.81)) / 100)


@pytest.mark.parametrize(
    "method",
    [DiversiFed(Config(tau=1.0)), FedAMP(FedAMPConfig(alpha=1.0, sigma=100.0))],
    ids=["diversifed", "fedamp"],
)
def test_coefficients_are_the_server_step(method):
    """`C W` is what the clients receive, and distances are those of the line."""
    plan = Plan(2, torch.arange(3), torch.ones(3, dtype=torch.int64))
    down = method.download(None, Hub(LINE), plan)
    found = method.relations(None, Hub(LINE), plan, down)
    assert list(found) == ["coefficient", "distance"]
    coefficients, distances = (matrix_of(pairs) for pairs in found.values())
    torch.testing.assert_close(coefficients @ LINE, down.anchor, rtol=1e-12, atol=1e-12)
    assert distances.tolist() == [[0, 1, 10], [1, 0, 9], [10, 9, 0]]
    assert method.relations(None, Hub(LINE), plan._replace(round=1), down) == {}


def test_pushed_pairs_have_negative_coefficients():
    method = DiversiFed(Config(tau=1.0))
    plan = Plan(2, torch.arange(3), torch.ones(3, dtype=torch.int64))
    found = method.relations(None, Hub(LINE), plan, method.download(None, Hub(LINE), plan))
    signs = matrix_of(found["coefficient"]).sign()
    # As in the numbers above: the nearer neighbour pulls, the other one pushes.
    assert (signs[0, 1], signs[0, 2], signs[1, 0], signs[1, 2]) == (1, -1, 1, -1)
    assert (signs[2, 1], signs[2, 0]) == (1, -1)


def test_recorded_where_asked_for_and_nowhere_else(tmp_path):
    config = {
        "rounds": 2,
        "method": {"name": "diversifed"},
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "linear"},
        "training": {"epochs": 1, "batch_size": 200, "optimizer": {"name": "sgd", "lr": 0.1}},
        "storage_path": str(tmp_path),
    }
    silent = raypfl.run(config, ["name=silent"])
    assert silent.diagnostics().empty
    told = raypfl.run(config, ["name=told", "evaluation.diagnostics=true"]).diagnostics()
    assert set(told["round"]) == {1, 2}
    # Round 1 starts from one common model.
    assert told.set_index(["round", "name"]).value[1, "distance_max"] == 0.0
    assert told.set_index(["round", "name"]).value[2, "distance_max"] > 0.0


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def test_what_clients_know_is_recorded(tmp_path, engine, request):
    if engine == "ray":
        request.getfixturevalue("cluster")
    """APPLE's relationships: every client's row, whatever host it is on."""
    config = {
        "rounds": 3,
        "method": {"name": "apple", "eta2": 0.05},
        "data": {"name": "digits"},
        "partition": {"name": "pathological", "num_clients": 4, "train_size": 60, "test_size": 10},
        "model": {"name": "linear"},
        "training": {"epochs": 1, "batch_size": 200, "optimizer": {"name": "sgd", "lr": 0.1}},
        "evaluation": {"every": 2, "diagnostics": True},
        "engine": {"name": engine, "num_actors": 2},
        "storage_path": str(tmp_path),
    }
    pairs = raypfl.run(config, ["name=told"]).pairs()
    assert pairs.groupby("round").size().to_dict() == {2: 16, 3: 16}
    assert set(pairs["name"]) == {"relationship"}
    last = pairs[pairs["round"] == 3].pivot(index="receiver", columns="source", values="value")
    assert last.shape == (4, 4) and (last.nunique() == 4).all(), "clients have rows of their own"


def test_matrices_are_recorded_in_evaluated_rounds(tmp_path):
    config = {
        "rounds": 5,
        "method": {"name": "diversifed"},
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "linear"},
        "training": {"epochs": 1, "batch_size": 200, "optimizer": {"name": "sgd", "lr": 0.1}},
        "evaluation": {"every": 2, "diagnostics": True},
        "storage_path": str(tmp_path),
    }
    result = raypfl.run(config, ["name=told"])
    pairs = result.pairs()
    # Every second round and the last one.
    assert pairs.groupby("name", observed=True)["round"].unique().map(list).to_dict() == {
        "coefficient": [2, 4, 5],
        "distance": [2, 4, 5],
    }
    assert pairs.groupby(["round", "name"], observed=True).size().unique().tolist() == [9]
    largest = pairs[pairs["name"] == "distance"].groupby("round")["value"].max()
    scalars = result.diagnostics().query("name == 'distance_max'").set_index("round")["value"]
    assert largest.to_dict() == scalars[[2, 4, 5]].to_dict()
    assert raypfl.run(config, ["name=silent", "evaluation.diagnostics=false"]).pairs().empty
