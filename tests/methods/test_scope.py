"""Methods of which all clients train in every round while the sampled ones alone upload."""

import pytest
import torch

from raypfl.methods.pfedme import Config as PFedMeConfig
from raypfl.methods.pfedme import PFedMe
from raypfl.methods.pfml import PFML
from raypfl.methods.pfml import Config as PFMLConfig
from raypfl.training import TrainingConfig

METHODS = {
    "pfedme": lambda scope: PFedMe(PFedMeConfig(local_batches=3, beta=1.5, update_scope=scope)),
    "pfml": lambda scope: PFML(PFMLConfig(local_batches=3, beta=1.5, agg_weight="size", update_scope=scope)),
}
SAMPLED = [[0, 1], [1, 3], [0, 3]]


@pytest.fixture
def toy(make_toy):
    return make_toy(training=TrainingConfig(epochs=1, batch_size=3), dtype=torch.float64)


def rounds(toy, method, sampled):
    hub, state = method.init_hub(toy.net, toy.clients), method.init_state(toy.net, toy.clients)
    for number, ids in enumerate(sampled, 1):
        plan = method.plan(toy.net, hub, toy.clients, number, lambda round, ids=ids: torch.tensor(ids))
        done = toy.round(method, hub, state, plan)
        yield plan, done
        hub, state = done.hub, done.state


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_everybody_trains_and_the_sampled_are_aggregated(make, toy):
    """In round 1 the server gets what it gets from the sampled alone; everybody's own models are new."""
    (plan, everybody), (_, selected) = (
        next(rounds(toy, make(scope), SAMPLED)) for scope in ("all", "selected")
    )
    assert plan.ids.tolist() == [0, 1, 2, 3] and plan.of_senders().ids.tolist() == [0, 1]
    torch.testing.assert_close(everybody.hub.w, selected.hub.w, rtol=1e-13, atol=1e-14)
    assert torch.equal(everybody.state.theta[:2], selected.state.theta[:2])
    assert (everybody.state.theta != selected.state.theta).any(1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_every_round_moves_every_client_by_its_own_batches(make, toy):
    *_, (_, last) = rounds(toy, make("all"), SAMPLED)
    assert last.state.position.tolist() == [9, 9, 9, 9]
    *_, (_, last) = rounds(toy, make("selected"), SAMPLED)
    assert last.state.position.tolist() == [6, 6, 0, 6]
