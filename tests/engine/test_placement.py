"""How many hosts, and what is refused with which arithmetic."""

from __future__ import annotations

import math

import pytest
from small_runs import NUM_CLIENTS, small_world

from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.placement import Node, Placement, connected, node_of_server, place
from raypfl.errors import PlacementError


def placed(nodes: list[Node], *overrides: str) -> Placement:
    world, _ = small_world("partition.num_clients=40", *overrides)
    return place(world, nodes)


def node(cpus: float, gpus: float = 0) -> Node:
    return Node(cpus, gpus, memory_bytes=math.inf)


@pytest.mark.parametrize(
    ("share", "gpus", "room"),
    [
        (0.5, 1, 2),
        (0.4, 1, 2),
        (0.4, 2, 4),  # not floor(2 / 0.4) = 5: the two rests of 0.2 are on different GPUs
        (0.3, 4, 12),  # not 13
        (1 / 93, 1, 93),  # 92.99999999999999 in binary
        (1, 3, 3),
        (2, 3, 1),
    ],
)
def test_shares_of_a_gpu_do_not_add_up_over_gpus(share: float, gpus: int, room: int) -> None:
    free = ["resources.num_cpus_per_actor=0", f"resources.num_gpus_per_actor={share}"]
    free += ["partition.num_clients=100", "partition.train_size=10", "partition.test_size=5"]
    world, _ = small_world(*free)
    assert place(world, [node(8, gpus)]).num_hosts == room
    fitting, _ = small_world(*free, f"engine.num_actors={room}")
    assert place(fitting, [node(8, gpus)]).num_hosts == room
    beyond, _ = small_world(*free, f"engine.num_actors={room + 1}")
    with pytest.raises(PlacementError, match=f"has room for {room} of them"):
        place(beyond, [node(8, gpus)])


def test_the_message_holds_the_arithmetic() -> None:
    ask = ["engine.num_actors=6", "resources.num_gpus_per_actor=0.4", "resources.num_cpus_per_actor=1"]
    with pytest.raises(PlacementError) as refused:
        placed([node(4, 2), node(1, 1)], *ask)
    assert str(refused.value) == (
        "the run asks for 6 client hosts with 1 CPU and 0.4 GPU each, and a server with 0 CPU. But a node "
        "with 4 CPU and 2 GPU has room for 4 of them; a node with 1 CPU and 1 GPU has room for 1 of them "
        "(floor(1 / 0.4) = 2 a GPU). Lower engine.num_actors, resources.num_cpus_per_actor or "
        "resources.num_gpus_per_actor, or add nodes."
    )


@pytest.mark.parametrize(
    ("server", "room"),
    [
        (0, 4),
        (0.2, 3),  # 0.8 of the first GPU is left, and floor(0.8 / 0.4) = 2: room for 4 by GPU, 3 by CPU
        (0.3, 3),  # 0.7: one host, and two on the other GPU
        (1, 2),
    ],
)
def test_the_server_has_its_share(server: float, room: int) -> None:
    ask = ["resources.num_gpus_per_actor=0.4", f"resources.num_gpus_server={server}"]
    ask += [f"resources.num_cpus_server={1 if server else 0}"]
    assert placed([node(4, 2)], *ask).num_hosts == room
    with pytest.raises(PlacementError):
        placed([node(4, 2)], *ask, f"engine.num_actors={room + 1}")


@pytest.mark.parametrize(
    ("nodes", "ask", "room"),
    [
        ([node(4), node(4)], {"num_cpus_server": 1}, 5),  # 8 cores without those of three servers
        ([node(2), node(2)], {"num_cpus_server": 1}, 1),
        # Of 4.5 and 3.5 cores hosts of 2 leave half and one and a half: two servers cost nothing there.
        ([node(4.5), node(3.5)], {"num_cpus_server": 0.75, "num_cpus_per_actor": 2}, 2),
        ([node(4.75), node(3.5)], {"num_cpus_server": 0.75, "num_cpus_per_actor": 2}, 3),
        # Two servers share a GPU, and the third leaves half of another: room for one host there.
        ([node(9, 3)], {"num_gpus_server": 0.5, "num_gpus_per_actor": 0.5}, 3),
        ([node(9, 2), node(9, 1)], {"num_gpus_server": 0.6, "num_gpus_per_actor": 0.4}, 3),
        ([node(9, 4)], {"num_gpus_server": 1, "num_gpus_per_actor": 0.5}, 2),
    ],
)
def test_every_one_of_several_servers_has_its_share(
    nodes: list[Node], ask: dict[str, float], room: int
) -> None:
    asked = ["server.sharding=3", "model={name: mlp, hidden: [300]}"]
    asked += [f"resources.{key}={value}" for key, value in ask.items()]
    assert placed(nodes, *asked, f"engine.num_actors={room}").num_servers == 3
    with pytest.raises(PlacementError, match=rf"3 servers .* the 3 servers there is room for {room}\. Lower"):
        placed(nodes, *asked, f"engine.num_actors={room + 1}")


def test_servers_that_do_not_all_fit_are_refused() -> None:
    asked = ["server.sharding=3", "model={name: mlp, hidden: [300]}", "resources.num_cpus_server=2"]
    with pytest.raises(PlacementError, match="3 servers with 2 CPU each.*there is room for 0"):
        placed([node(3), node(3)], *asked, "engine.num_actors=1")


def test_the_server_goes_where_most_hosts_stay() -> None:
    # On the node with 3 CPUs it costs no host of 2 CPUs.
    ask = ["resources.num_cpus_per_actor=2", "resources.num_cpus_server=1"]
    assert placed([node(4), node(3)], *ask).num_hosts == 3


def test_a_server_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(PlacementError, match="a server with 3 CPU.*beside the server there is room for 0"):
        placed([node(2), node(2)], "resources.num_cpus_server=3")


@pytest.mark.parametrize(("server", "room"), [("any", 5), ("beside", 5), ("apart", 3)])
def test_a_server_apart_costs_the_smallest_node(server: str, room: int) -> None:
    nodes, ask = [node(2), node(3)], [f"resources.server={server}"]
    assert placed(nodes, *ask).num_hosts == room
    if server == "apart":
        with pytest.raises(PlacementError) as refused:
            placed(nodes, *ask, "engine.num_actors=4")
        assert "a server with 0 CPU on a node without hosts." in str(refused.value)
        assert "without the server's node there is room for 3." in str(refused.value)


def test_the_server_beside_needs_a_node_with_room_for_both() -> None:
    ask = ["resources.num_cpus_server=2", "resources.server=beside", "engine.num_actors=1"]
    assert placed([node(1), node(3)], *ask).num_hosts == 1
    with pytest.raises(PlacementError, match="a server with 2 CPU beside a host"):
        placed([node(1), node(2)], *ask)
    asked = placed([node(1), node(3)], *ask)
    chosen = node_of_server(asked, [Node(1, 0, 0, "small"), Node(3, 0, 0, "large")])
    assert chosen is not None and chosen.id == "large"


def test_unlike_nodes_have_as_many_hosts_as_fit_each() -> None:
    # Room for 3 by CPU and 4 by GPU; for none; for 1 and 2.
    nodes = [node(3, 2), node(8), node(1.5, 1)]
    ask = ["resources.num_gpus_per_actor=0.5", "resources.num_cpus_server=1", "resources.server=apart"]
    assert placed(nodes, *ask).num_hosts == 4
    chosen = node_of_server(placed(nodes, *ask), nodes)
    assert chosen == node(8), "where it costs no host"


def test_the_address_of_a_dashboard_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with (
        pytest.raises(
            PlacementError, match="is the address of a dashboard, which takes jobs: cluster/submit"
        ),
        connected("http://127.0.0.1:8265"),
    ):
        pass


def test_a_host_a_core_where_nothing_else_is_asked_for() -> None:
    assert placed([node(2)]) == Placement(2, host_cpus=1, host_gpus=0, server_cpus=0, server_gpus=0)
    assert placed([node(2), node(3)]).num_hosts == 5
    assert placed([node(2)], "resources.num_cpus_per_actor=0").num_hosts == 2
    assert placed([node(64)], "engine.block=20").num_hosts == 2, "no more than there are blocks"


def test_hosts_that_ask_for_nothing_always_fit() -> None:
    assert placed([node(1)], "resources.num_cpus_per_actor=0", "engine.num_actors=9").num_hosts == 9


def test_more_hosts_than_cores_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"3 client hosts with 1 CPU each.*2 CPU has room for 2 of them"):
        placed([node(2)], "engine.num_actors=3")
    assert placed([node(2)], "engine.num_actors=3", "resources.num_cpus_per_actor=0.5").num_hosts == 3


def test_one_client_an_actor() -> None:
    ask = ["engine.clients_per_actor=1", "engine.block=auto", "resources.num_cpus_per_actor=0.5"]
    world, _ = small_world(*ask)
    placement = place(world, [node(2)])
    assert placement.num_hosts == NUM_CLIENTS
    dealt = deal(world, placement.num_hosts)
    assert sorted(ids_of(world, blocks).tolist() for blocks in dealt) == [[0], [1], [2], [3]]


def test_a_cluster_that_does_not_start_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(
            PlacementError, match=r"this machine: .* timed out .*\n.*engine.name=local needs no Ray"
        ),
        connected(None),
    ):
        raise AssertionError("there is no cluster")


def test_a_cluster_that_is_not_there_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with (
        pytest.raises(PlacementError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "),
        connected("127.0.0.1:1"),
    ):
        pass
