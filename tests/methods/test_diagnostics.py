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
