"""Modules bound to rows: the columns, and one model after the other against all at once."""

import copy
from collections import OrderedDict

import pytest
import torch
from plain_torch import CLASSES, HEADS, SHAPE, conv, draws, mlp, network, to_module, to_row
from torch import nn
from torch.func import functional_call

from raypfl.errors import ShapeError
from raypfl.rng import torch_seeded
from raypfl.training import Network
from raypfl.training.splitting import check_split

K, B = 3, 5

each_module = pytest.mark.parametrize("build", HEADS)


def images(num_models: int = K, batch_size: int = B, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_models, batch_size, *SHAPE, dtype=torch.float64, generator=generator)


def in_training(net: Network, w: torch.Tensor):
    """Models in training mode, their weights as a leaf: what `fit` hands to an objective."""
    leaf = w[:, net.weights].clone().requires_grad_()
    return net.bind(w, w[:, net.statistics].clone(), leaf=leaf)


def test_columns_are_head_extractor_buffers_padding():
    net = network(conv)
    # Head 32 x 3 + 3; convolution 2 x 9; normalisation 2 + 2 weights, 2 means and 2 variances.
    assert (net.head, net.extractor) == (slice(0, 99), slice(99, 121))
    assert (net.weights, net.statistics) == (slice(0, 121), slice(121, 125))
    assert (net.num_weights, net.width) == (121, 128)
    row = net.draw(7)
    with torch_seeded(7):
        module = conv().double()
    in_order = ["head.weight", "head.bias", "conv.weight", "norm.weight", "norm.bias"]
    buffers = ["norm.running_mean", "norm.running_var"]
    values = module.state_dict()
    expected = torch.cat([values[name].flatten() for name in (*in_order, *buffers)])
    assert torch.equal(row[0, :125], expected)
    assert torch.equal(row[0, 125:], torch.zeros(3, dtype=torch.float64))


def test_tensors_are_cut_from_the_weights_in_column_order():
    net = Network(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "1")
    sizes = [columns.stop - columns.start for columns in net.tensors]
    assert sizes == [6, 2, 12, 3], "the head's weight and bias, then the extractor's"
    assert [0, *(columns.stop for columns in net.tensors)] == [0, 6, 8, 20, 23]
    assert net.tensors[-1].stop == net.num_weights


@each_module
def test_rows_are_a_multiple_of_16(build):
    net = network(build)
    assert net.width % 16 == 0
    assert net.statistics.stop <= net.width < net.statistics.stop + 16


def test_a_row_that_fits_exactly_has_no_padding():
    net = Network(lambda: nn.Sequential(OrderedDict(fc=nn.Linear(2, 3), head=nn.Linear(3, 7))), "head")
    assert (net.num_weights, net.width) == (37, 48)
    net = Network(lambda: nn.Sequential(OrderedDict(fc=nn.Linear(1, 1), head=nn.Linear(1, 7))), "head")
    assert (net.num_weights, net.width) == (16, 16)


@pytest.mark.parametrize(
    "buffers, body, shared, private",
    [
        ("average", slice(99, 125), slice(0, 125), slice(125, 125)),
        ("local", slice(99, 121), slice(0, 121), slice(121, 125)),
    ],
)
def test_buffer_policy_decides_what_travels(buffers, body, shared, private):
    net = network(conv, buffers=buffers)
    assert (net.body, net.shared, net.private) == (body, shared, private)


@each_module
def test_split_module_is_bitwise_the_module(build):
    net = network(build)
    w = draws(net, 1)
    x = images(1)
    m = net.bind(w)
    expected = to_module(w[0], build(), HEADS[build]).eval()(x[0])
    assert torch.equal(m(x)[0], expected)
    assert torch.equal(m.classify(m.features(x))[0], expected)


def test_head_of_a_sequential_may_begin_anywhere():
    net = Network(mlp, "act", dtype=torch.float64)
    assert net.head == slice(0, 5 * CLASSES + CLASSES)
    x = images(1)
    m = net.bind(draws(net, 1))
    assert m.features(x).shape == (1, B, 5)
    assert torch.equal(m.classify(m.features(x)), m(x))


@each_module
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_stack_equals_one_at_a_time(build, mode):
    net = network(build)
    w, x = draws(net, K), images()

    def outcome(rows):
        leaf = w[rows, net.weights].clone().requires_grad_()
        m = net.bind(w[rows], w[rows, net.statistics].clone() if mode == "training" else None, leaf=leaf)
        out = m(x[rows])
        out.square().sum().backward()
        return out.detach(), leaf.grad, m.buffers

    together = outcome(slice(0, K))
    alone = [torch.cat(parts) for parts in zip(*(outcome(slice(k, k + 1)) for k in range(K)), strict=True)]
    for got, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_models", [1, K])
def test_statistics_after_a_training_step_are_those_of_plain_modules(num_models):
    # torch's own layer under vmap updates a copy, without a word.
    net = network(conv)
    w, x = draws(net, num_models), images(num_models)
    m = in_training(net, w)
    m(x)
    for row in range(num_models):
        plain = to_module(w[row], conv(nn.BatchNorm2d), "head").train()
        plain(x[row])
        expected = to_row(plain, "head", net.width)[net.statistics]
        torch.testing.assert_close(m.buffers[row], expected, rtol=1e-12, atol=1e-12)
        assert not torch.equal(m.buffers[row], w[row, net.statistics])


@pytest.mark.parametrize("build", [mlp, conv])
def test_one_head_row_is_shared(build):
    net = network(build)
    w, x = draws(net, K), images()
    m = net.bind(w)
    z = m.features(x)
    head = w[:1, net.head].clone().requires_grad_()
    shared = m.classify(z, head)
    shared.square().sum().backward()
    repeated = w[:1, net.head].repeat(K, 1).requires_grad_()
    expected = m.classify(z, repeated)
    expected.square().sum().backward()
    torch.testing.assert_close(shared, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.grad[0], repeated.grad.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_models", [1, K])
@pytest.mark.parametrize("num_heads", [1, K])
@pytest.mark.parametrize("detach", [None, "own", "other"])
def test_two_heads_at_once_are_bitwise_two_calls(num_models, num_heads, detach):
    net, x = network(mlp), images(num_models)
    w = torch.cat([net.draw(key) for key in range(num_models)])
    heads = torch.cat([net.draw(10 + key) for key in range(min(num_heads, num_models))])[:, net.head]

    def gradients(both):
        m, other = in_training(net, w), heads.clone().requires_grad_()
        own, second = both(m, other)
        loss = own.square().sum() + second.exp().sum()
        return own, second, *torch.autograd.grad(loss, [m.w, other])

    def apart(m, other):
        z = m.features(x)
        own, second = (z.detach() if whose == detach else z for whose in ("own", "other"))
        return m.classify(own), m.classify(second, head=other)

    together = gradients(lambda m, other: m.logits_of_two(x, other, detach=detach))
    for one, two in zip(together, gradients(apart), strict=True):
        assert torch.equal(one, two)


def test_evaluation_never_touches_running_statistics():
    net = network(conv)
    w, x = draws(net, K), images()
    kept = w.clone()
    net.bind(w)(x)
    m = in_training(net, w)
    m.evaluating()(x)
    m.evaluating().features(x)
    assert torch.equal(w, kept)
    assert torch.equal(m.buffers, kept[:, net.statistics])
    m(x)
    assert not torch.equal(m.buffers, kept[:, net.statistics])


@pytest.mark.parametrize("unit_first", [True, False])
@pytest.mark.parametrize("num_models", [1, K])
def test_evaluation_features_inside_a_training_step(num_models, unit_first):
    """A unit term: gradients through running statistics that the training forward of the same step moves."""
    net = network(conv)
    w, x, units = draws(net, num_models), images(num_models), images(num_models, 2, seed=1)
    m = in_training(net, w)
    terms = [lambda: m(x).square().sum(), lambda: m.evaluating().features(units).square().sum()]
    sum(term() for term in (reversed(terms) if unit_first else terms)).backward()
    for row in range(num_models):
        plain = to_module(w[row], conv(nn.BatchNorm2d), "head").train()
        frozen = {name: value.clone() for name, value in plain.named_buffers()}
        if not unit_first:
            moved = copy.deepcopy(plain)
            moved(x[row])
            frozen = dict(moved.named_buffers())
        plain(x[row]).square().sum().backward()
        body = plain.eval()[:-1]
        names = {name: value for name, value in body.named_parameters()}
        unit = functional_call(
            body, (names, {k: v for k, v in frozen.items() if k.startswith("norm")}), units[row]
        )
        unit.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
        head = [gradients.pop(name).flatten() for name in ("head.weight", "head.bias")]
        expected = torch.cat([*head, *(g.flatten() for g in gradients.values())])
        torch.testing.assert_close(m.w.grad[row], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("piece", ["head", "extractor"])
def test_leaf_of_one_piece_is_read_in_place_of_the_rows(piece):
    net = network(conv)
    w, other, x = draws(net, K), draws(net, K).flip(0), images()
    columns = getattr(net, piece)
    mixed = w.clone()
    mixed[:, columns] = other[:, columns]
    m = net.bind(w, leaf=other[:, columns], columns=columns)
    assert torch.equal(m.w, other[:, columns])
    # Statistics are those of `w` in both.
    assert torch.equal(m(x), net.bind(mixed)(x))


def test_other_columns_are_refused():
    net = network(mlp)
    with pytest.raises(ShapeError, match="neither the head, the extractor nor all weights"):
        net.bind(draws(net, 1), columns=slice(3, 5))


def test_draw_is_a_function_of_its_key_alone():
    net = network(mlp)
    state = torch.get_rng_state()
    first = net.draw(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(10)
    assert torch.equal(network(mlp).draw(3), first)
    assert not torch.equal(net.draw(4), first)


def test_making_a_network_draws_nothing_from_outside():
    state = torch.get_rng_state()
    network(conv)
    assert torch.equal(torch.get_rng_state(), state)


def test_assemble_puts_pieces_side_by_side():
    net = network(conv, buffers="local")
    w = draws(net, K)
    assert torch.equal(net.assemble(w[:, net.shared], w[:, net.private]), w)
    one_body = net.assemble(w[:, net.head], w[:1, net.body], w[:, net.private])
    assert torch.equal(one_body[:, net.extractor], w[:1, net.extractor].expand(K, -1))
    assert torch.equal(one_body[:, net.head], w[:, net.head])
    with pytest.raises(ShapeError, match="pieces with 121 columns do not make a row of 125"):
        net.assemble(w[:, net.weights])


def test_models_are_taken_out_of_the_module_even_after_an_error():
    net = network(mlp)
    before = [slot.owner._parameters[slot.name] for slot in net._slots]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net.bind(draws(net, 1))(images(1)[..., :3])
    assert all(slot.owner._parameters[slot.name] is own for slot, own in zip(net._slots, before, strict=True))


def test_torchs_batch_norm_is_refused_by_name():
    with pytest.raises(ShapeError, match=r"'norm' is a BatchNorm2d.*raypfl\.models\.BatchNorm2d"):
        Network(lambda: conv(nn.BatchNorm2d), "head")


def test_tied_parameters_are_refused_by_name():
    def tied() -> nn.Module:
        module = nn.Sequential(
            OrderedDict(first=nn.Linear(4, 4), second=nn.Linear(4, 4), head=nn.Linear(4, 2))
        )
        module.second.weight = module.first.weight
        return module

    with pytest.raises(ShapeError, match=r"'first\.weight' and 'second\.weight' are one tensor"):
        Network(tied, "head")


def test_a_module_used_twice_is_refused():
    def twice() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(OrderedDict(first=layer, second=layer, head=nn.Linear(4, 2)))

    with pytest.raises(ShapeError, match=r"'first\.weight' and 'second\.weight' are one tensor"):
        Network(twice, "head")


def test_unknown_head_names_what_there_is():
    with pytest.raises(
        ShapeError, match=r"model\.head = 'fc7': Nested has no such submodule.*classifier\.out"
    ):
        Network(next(build for build in HEADS if build not in (mlp, conv)), "fc7")


def test_coupling_and_randomness_are_noticed():
    dropout = nn.Sequential(OrderedDict(drop=nn.Dropout(0.5), head=nn.Linear(4, 2)))
    found = [network(mlp), network(conv), Network(lambda: dropout, "head")]
    assert [net.coupled for net in found] == [False, True, False]
    assert [net.random for net in found] == [False, False, True]


class _Scaled(nn.Module):
    """Computes something after its head."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return 2 * self.fc(self.body(x))


def test_a_module_that_goes_on_after_its_head_is_refused():
    with pytest.raises(ShapeError, match=r"'fc': _Scaled computes something after its head"):
        check_split(_Scaled(), "fc", torch.ones(2, 3))
    check_split(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "1", torch.ones(2, 3))
