"""What is tried on clients' data: every kind of model that a method has, each read by the method."""

from __future__ import annotations

import numpy as np
import torch

from raypfl.data import ClientIndices, Federation, Pool
from raypfl.engine.local import LocalEngine
from raypfl.engine.world import make_world
from raypfl.methods import METHODS
from raypfl.methods.local import Local
from raypfl.settings import RunConfig

CLASSES = 3


class Constant(Local):
    """Trains alone; besides, each client has an answer that looks at no sample: its id modulo the classes."""

    summary = "of a test"

    def alternative(self, net, state, down, up=None):
        # Of another length than a model, and not in the same order if someone mixed clients up.
        return state.w.sum(1, keepdim=True)

    def answer(self, net, model, ids, rows):
        if model != "alternative":
            return super().answer(net, model, ids, rows)
        assert rows.shape == (len(ids), 1)
        chosen = torch.nn.functional.one_hot(ids % CLASSES, CLASSES).float()
        return lambda x: chosen[:, None].expand(-1, x.shape[1], -1)


def test_a_method_reads_its_own_rows(monkeypatch):
    monkeypatch.setitem(METHODS, "local", Constant)
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(CLASSES), 6)
    x = rng.normal(size=(len(y), 1, 4, 4)).astype(np.float32)
    own = [np.flatnonzero(y == client % CLASSES) for client in range(5)]
    clients = tuple(ClientIndices(rows[:4], rows[:0], rows[4:]) for rows in own)
    config = RunConfig(
        rounds=2,
        seed=0,
        data={"name": "digits"},
        partition={"name": "iid", "num_clients": 5},
        participation={"count": 2},
        model={"name": "linear"},
        engine={"num_actors": 2},
        method={"name": "local"},
    )
    world = make_world(config, Pool("toy", x, y, len(y), CLASSES, None, "toy"), Federation(clients))
    engine = LocalEngine(world, Pool("toy", x, y, len(y), CLASSES, None, "toy"))
    report = engine.round(1, evaluate_pre=True, evaluate_post=True)
    kinds = {(block["model"], block["point"]) for block in report.clients if block["split"] == "test"}
    assert kinds == {(m, p) for m in ("personalised", "alternative") for p in ("pre", "post")}
    for block in report.clients:
        if block["model"] == "alternative":
            assert (np.asarray(block["accuracy"]) == 1.0).all()
    engine.close()
