"""The same models and the same training without rows: modules, `torch.optim`, one client at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypfl.models import BatchNorm2d
from raypfl.rng import key
from raypfl.training import ClientData, Network, Samples, TrainingConfig
from raypfl.training.batches import shuffled

CLASSES = 3
SHAPE = (1, 4, 4)
SIZES = (5, 1, 7, 4)
"""Training samples of the clients; for batches of 3: one sample, one more than a multiple, and neither."""


def mlp() -> nn.Module:
    layers = [
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(16, 5)),
        ("act", nn.Tanh()),
        ("head", nn.Linear(5, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers))


def conv(norm: type[nn.Module] = BatchNorm2d) -> nn.Module:
    layers = [("conv", nn.Conv2d(1, 2, 3, padding=1, bias=False)), ("norm", norm(2)), ("act", nn.Tanh())]
    return nn.Sequential(OrderedDict([*layers, ("flatten", nn.Flatten()), ("head", nn.Linear(32, CLASSES))]))


class Classifier(nn.Module):
    """Holds a head below the top, behind a layer that belongs to the extractor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)))


class Nested(nn.Module):
    """Not an `nn.Sequential`; its head is `classifier.out`."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier()
        self.stem = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.stem(x.flatten(1))))


HEADS: dict[Callable[[], nn.Module], str] = {mlp: "head", conv: "head", Nested: "classifier.out"}


def network(build: Callable[[], nn.Module], **options: object) -> Network:
    return Network(build, HEADS[build], dtype=torch.float64, **options)


def draws(net: Network, count: int = len(SIZES)) -> Tensor:
    """Models that all differ, `[count, width]`, with running statistics that are not those of a new one."""
    w = torch.cat([net.draw(key(0, "test", client=client)) for client in range(count)])
    shift = torch.arange(1, count + 1, dtype=w.dtype)[:, None] / 10
    w[:, net.statistics] += shift
    return w


def toy_data() -> ClientData:
    """Clients of `SIZES` random images each; two of them with validation samples."""
    rng = np.random.default_rng(0)
    total = sum(SIZES)
    x = torch.from_numpy(rng.normal(size=(total, *SHAPE)))
    y = torch.from_numpy(rng.integers(0, CLASSES, total))
    train = np.split(rng.permutation(total), np.cumsum(SIZES)[:-1])
    validation = [np.array([0, 1]), np.array([], np.int64), np.array([2]), np.array([], np.int64)]
    return ClientData(Samples(x, y), CLASSES, train, validation, [own[:1] for own in train])


def tensors(module: nn.Module, head: str) -> Iterator[Tensor]:
    """Parameters and running statistics in column order."""
    for named in (module.named_parameters, module.named_buffers):
        of_head = {name: tensor for name, tensor in named() if name.startswith(f"{head}.")}
        others = {name: tensor for name, tensor in named() if name not in of_head}
        yield from (tensor for tensor in (*of_head.values(), *others.values()) if tensor.is_floating_point())


def to_module(row: Tensor, module: nn.Module, head: str) -> nn.Module:
    """The module with the values of a row `[width]`, in float64."""
    module = module.double()
    pieces = list(tensors(module, head))
    with torch.no_grad():
        for tensor, values in zip(
            pieces, row.split([*map(torch.numel, pieces), _rest(row, pieces)]), strict=False
        ):
            tensor.copy_(values.view(tensor.shape))
    return module


def to_row(module: nn.Module, head: str, width: int) -> Tensor:
    """The inverse of `to_module`: `[width]`."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors(module, head)])
    return F.pad(values, (0, width - len(values)))


def _rest(row: Tensor, pieces: list[Tensor]) -> int:
    return len(row) - sum(piece.numel() for piece in pieces)


def train(
    row: Tensor,
    module: nn.Module,
    head: str,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    data: ClientData,
    client: int,
    training: TrainingConfig,
    trained: Callable[[str], bool] = lambda name: True,
    pull: tuple[float, Tensor] | None = None,
) -> Tensor:
    """One client's local training in round 1, as anyone would write it; the new row `[width]`."""
    module = to_module(row, module, head).train()
    chosen = [parameter for name, parameter in module.named_parameters() if trained(name)]
    anchors = [] if pull is None else list(to_module(pull[1], mlp(), head).parameters())
    optimizer = make_optimizer(chosen)
    draw = key(0, "batches", 1, client)
    (plan,) = shuffled([data.train[client]], [draw], training.epochs, training.batch_size)
    for indices, size in zip(plan.rows[0], plan.sizes[0], strict=True):
        batch = torch.from_numpy(indices[:size])
        loss = F.cross_entropy(module(data.pool.x[batch]), data.pool.y[batch])
        for parameter, anchor in zip(chosen, anchors, strict=bool(anchors)):
            loss = loss + pull[0] / 2 * (parameter - anchor.detach()).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return to_row(module, head, len(row))
