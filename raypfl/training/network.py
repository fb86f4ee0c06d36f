"""A module bound to rows: N models of one architecture are a matrix `[N, width]`.

Column order of a row: head | extractor | floating-point buffers, first the extractor's | zeros up to a
multiple of 16, so that every row starts aligned (an unaligned row changes the last bits of a batch of one
sample) and every piece a method names is one contiguous slice. Where normalisation layers stay at home
(`fedbn`), their parameters are the extractor's last columns, next to the buffers.
"""

# K models, B samples a model.

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from raypfl.errors import ShapeError
from raypfl.rng import torch_seeded
from raypfl.training.dense import Dense, DenseParts, dense_parts
from raypfl.training.layout import channels_last, takes_channels_last
from raypfl.training.pooling import with_fast_pooling
from raypfl.training.precision import Precision, arithmetic, with_rough_convolutions
from raypfl.training.slots import Slot, bound, buffer_slots, parameter_slots, split
from raypfl.training.splitting import split_at

ALIGNMENT = 16
BufferPolicy = Literal["average", "local", "fedbn"]
_NO_PART = "columns {} are neither the head, the extractor nor all weights"

NORMALISING = (_NormBase, nn.GroupNorm, nn.LayerNorm)
"""Layers whose parameters stay at home under `fedbn`."""


class Network:
    """Binds the models of one architecture to rows.

    Args:
        build: makes the module; called again for every initialisation that is drawn.
        head: name of the submodule that is the head. In an `nn.Sequential` it is the direct child where the
            head begins: that child and all after it.
        buffers: `average`: floating-point buffers (running statistics) travel with the extractor;
            `local`: they never leave their client; `fedbn`: as little do the parameters of normalisation
            layers.
        input_shape: of one sample, for methods that give models inputs of their own.
        personal: networks of models that clients keep for themselves, where they are others than this one.
        precision: of products and convolutions while models train.

    Attributes:
        head, extractor, weights: column slices; `weights` is both.
        statistics: the columns of the buffers.
        body: the extractor, with its buffers where they travel.
        kept: the buffers that stay at home when only the body travels: the head's, or all.
        shared: everything that travels when a whole model does; `private`: the columns that stay at home.
        shared_weights: the parameters among `shared`: all, except under `fedbn`.
        travelling: the columns of buffers that travel, none or all.
        head_name: where the head begins, as it was given.
        linear_head: the head is one linear layer, so sums of heads give sums of logits.
        tensors: the columns of each parameter tensor, in column order; `shapes`: its sides.
        width: columns of a row, padding included.
        coupled: samples of a batch influence each other (batch normalisation); never pad such a batch.
        random: there are dropout layers, so features differ from pass to pass.
        personal: the networks of clients' own models: this one alone, unless others were given.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        head: str,
        *,
        buffers: BufferPolicy = "average",
        input_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        personal: Sequence[Network] = (),
        precision: Precision = "float32",
    ) -> None:
        self._build = build
        self.precision: Precision = precision
        self.input_shape = tuple(input_shape)
        self.head_name = head
        self.dtype = dtype
        self.device = torch.device(device)
        with torch_seeded(0):
            module = build()
        self._extractor, self._head = split_at(module, head)
        self._extractor.to(dtype=dtype, device=self.device)
        self._head.to(dtype=dtype, device=self.device)
        _refuse_unbindable(module)
        self.buffers = buffers
        head_slots, extractor_slots, own_norms = self._ordered(self._head, self._extractor)
        self._slots = [*head_slots, *extractor_slots]
        self._num_head_slots = len(head_slots)
        own_buffers = buffer_slots(self._extractor)
        self._buffer_slots = [*own_buffers, *buffer_slots(self._head)]

        num_head, num_extractor, num_buffers = (
            sum(slot.size for slot in slots) for slots in (head_slots, extractor_slots, self._buffer_slots)
        )
        num_weights = num_head + num_extractor
        used = num_weights + num_buffers
        stays = num_weights - sum(slot.size for slot in own_norms)
        travels = used if buffers == "average" else stays
        self.head = slice(0, num_head)
        self.extractor = slice(num_head, num_weights)
        self.weights = slice(0, num_weights)
        self.statistics = slice(num_weights, used)
        body = num_weights + sum(slot.size for slot in own_buffers) if buffers == "average" else stays
        self.body = slice(num_head, body)
        self.kept = slice(body, used)
        self.shared = slice(0, travels)
        self.private = slice(travels, used)
        self.shared_weights = slice(0, stays)
        self.travelling = slice(num_weights, max(travels, num_weights))
        ends = list(itertools.accumulate(slot.size for slot in self._slots))
        self.tensors = [slice(end - slot.size, end) for slot, end in zip(self._slots, ends, strict=True)]
        self.shapes = [tuple(slot.shape) for slot in self._slots]
        self.num_weights = num_weights
        self.linear_head = _is_linear(self._head)
        self.width = -(-used // ALIGNMENT) * ALIGNMENT
        modules = list(module.modules())
        self.coupled = any(isinstance(part, _BatchNorm) for part in modules)
        self.random = any(isinstance(part, _DropoutNd) for part in modules)
        self._channels_last = self.device.type == "cpu" and takes_channels_last(module)
        self._training: bool | None = None
        self._pools = [*with_fast_pooling(self._extractor), *with_fast_pooling(self._head)]
        # A GPU does the same small step of several models at once, and vmap asks it to.
        # The columns of a trunk under `fedbn` may be apart.
        trunks = self.device.type == "cpu" and buffers != "fedbn"
        self._dense = dense_parts(self._extractor, self._head, self.input_shape, trunks=trunks)
        if precision == "bfloat16":
            # The layers of dense parts write their gradients themselves, in the precision of the weights.
            self._dense = None
            with_rough_convolutions(module)
        self.personal: tuple[Network, ...] = tuple(personal) or (self,)

    def _ordered(self, head: nn.Module, extractor: nn.Module) -> tuple[list[Slot], list[Slot], list[Slot]]:
        """Parameters of head and extractor in column order, and those of the latter that never travel."""
        head_slots, extractor_slots = parameter_slots(head), parameter_slots(extractor)
        if self.buffers != "fedbn":
            return head_slots, extractor_slots, []
        if any(isinstance(slot.owner, NORMALISING) for slot in head_slots):
            raise ShapeError(
                f"model.buffers = 'fedbn': there are normalisation layers in the head, which begins at "
                f"{self.head_name!r}. Use buffers 'local', or a model.head behind them."
            )
        norms = [slot for slot in extractor_slots if isinstance(slot.owner, NORMALISING)]
        others = [slot for slot in extractor_slots if not isinstance(slot.owner, NORMALISING)]
        return head_slots, [*others, *norms], norms

    @cached_property
    def num_outputs(self) -> int:
        """Logits of one sample; needs `input_shape`."""
        self.set_training(False)
        x = torch.zeros(1, *self.input_shape, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            return int(self._head(self._extractor(x)).shape[-1])

    def draw(self, key: int) -> Tensor:
        """A freshly initialised model as a row `[1, width]`, a function of `key` alone."""
        with torch_seeded(key):
            extractor, head = split_at(self._build(), self.head_name)
        head_slots, extractor_slots, _ = self._ordered(head, extractor)
        slots = [*head_slots, *extractor_slots, *buffer_slots(extractor), *buffer_slots(head)]
        parts = [getattr(slot.owner, slot.name).detach().reshape(-1).to(self.dtype) for slot in slots]
        row = torch.zeros(1, self.width, dtype=self.dtype)
        row[0, : self.statistics.stop] = torch.cat(parts)
        return row.to(self.device)

    def assemble(self, *pieces: Tensor) -> Tensor:
        """Rows `[K, width]` from pieces in column order; pieces with one row are repeated for all."""
        num_rows = max(len(piece) for piece in pieces)
        rows = pieces[0].new_zeros(num_rows, self.width)
        start = 0
        for piece in pieces:
            stop = start + piece.shape[1]
            rows[:, start:stop] = piece
            start = stop
        if start not in (self.statistics.stop, self.width):
            raise ShapeError(f"pieces with {start} columns do not make a row of {self.statistics.stop}")
        return rows

    def bind(
        self,
        rows: Tensor,
        buffers: Tensor | None = None,
        *,
        leaf: Tensor | None = None,
        columns: slice | None = None,
    ) -> Rows:
        """Models ready to be called.

        Args:
            rows: models `[K, width]`.
            buffers: running statistics `[K, b]` that training writes to; without them the models are in
                evaluation mode, on a copy of those in `rows`.
            leaf: the columns in training `[K, columns]`, to be read in place of those in `rows`.
            columns: which columns `leaf` holds: `weights` (default), `head` or `extractor`.
        """
        training = buffers is not None
        if buffers is None:
            buffers = rows[:, self.statistics].clone()
        if columns is None:
            columns = self.weights
        w = rows[:, columns] if leaf is None else leaf
        if self._dense is not None and len(w) > 1:
            if columns == self.weights:
                halves = w.split((self.head.stop, self.num_weights - self.head.stop), dim=1)
            elif columns == self.head:
                halves = w, rows[:, self.extractor]
            elif columns == self.extractor:
                halves = rows[:, self.head], w
            else:
                raise ShapeError(_NO_PART.format(columns))
            dense = self._dense if columns == self.weights else self._dense._replace(both=None)
            return Rows(self, w, buffers, halves, training, dense)
        first = self._num_head_slots
        if columns == self.weights:
            pieces = split(w, self._slots)
        elif columns == self.head:
            pieces = split(w, self._slots[:first]) + split(rows[:, self.extractor], self._slots[first:])
        elif columns == self.extractor:
            pieces = split(rows[:, self.head], self._slots[:first]) + split(w, self._slots[first:])
        else:
            raise ShapeError(_NO_PART.format(columns))
        return Rows(self, w, buffers, pieces, training)

    def slopes(
        self, loss_K: Tensor, leaves: Sequence[Tensor], *, keep: bool = False, differentiable: bool = False
    ) -> tuple[Tensor, ...]:
        """The gradients of each model's loss by its own rows of the leaves.

        Args:
            loss_K: one loss a model.
            leaves: tensors with a row a model.
            keep: gradients of the same losses are asked for again.
            differentiable: gradients have a graph of their own.
        """
        with arithmetic(self.precision, self.device):
            return torch.autograd.grad(
                loss_K.sum(), leaves, retain_graph=keep or differentiable, create_graph=differentiable
            )

    def set_training(self, training: bool) -> None:
        """Put the modules into training or evaluation mode, if they are not."""
        if self._training is not training:
            self._extractor.train(training)
            self._head.train(training)
            self._training = training


class Rows(NamedTuple):
    """K models bound to their rows: what an objective receives. Made by `Network.bind`."""

    net: Network
    w: Tensor
    """The columns in training, `[K, columns]`: parameters only, never buffers. The leaf of the gradient."""
    buffers: Tensor
    """Running statistics `[K, b]`, written by normalisation layers in training mode."""
    pieces: tuple[Tensor, ...]
    """Every parameter, `[K, size]`, in column order; one split of `w`, so that its backward is one copy.
    Of several models made of linear layers alone, head and extractor instead."""
    training: bool
    dense: DenseParts | None = None
    """How such models are called; None for others."""

    def __call__(self, x: Tensor) -> Tensor:
        """Logits `[K, B, classes]` of inputs `[K, B, ...]`, each model on its own batch."""
        net = self.net
        if self.dense is not None:
            extractor, head, both = self.dense
            if both is not None:
                return self._through(both, x, self.w)
            z = self._through(extractor, x, self.pieces[1])
            return self._through(head, z, self.pieces[0])
        logits: Tensor = self._run(lambda x: net._head(net._extractor(x)), x, net._slots, self.pieces)
        return logits

    def features(self, x: Tensor) -> Tensor:
        """What enters the head: `[K, B, ...]`."""
        net = self.net
        if self.dense is not None:
            return self._through(self.dense.extractor, x, self.pieces[1])
        first = net._num_head_slots
        z: Tensor = self._run(net._extractor, x, net._slots[first:], self.pieces[first:])
        return z

    def classify(self, z: Tensor, head: Tensor | None = None) -> Tensor:
        """Logits of features `[K, B, ...]`, with other heads `[K or 1, head columns]` if they are given."""
        net = self.net
        if self.dense is not None:
            rows = self.pieces[0] if head is None else head.expand(len(z), -1)
            return self._through(self.dense.head, z, rows)
        slots = net._slots[: net._num_head_slots]
        pieces = self.pieces[: len(slots)] if head is None else split(head, slots)
        logits: Tensor = self._run(net._head, z, slots, pieces)
        return logits

    def features_and_logits(self, x: Tensor, *, detach: bool = False) -> tuple[Tensor, Tensor]:
        """What enters the head and what leaves it: as `features` and `classify`, in less time.

        Same bits, but the way into `vmap` is paid once (three times it is a tenth of a small network's step),
        and the gradients of head and extractor are written where they belong.

        Args:
            x: inputs `[K, B, ...]`.
            detach: logits do not move the extractor.
        """
        net = self.net
        if self.dense is not None:
            extractor, _, both = self.dense
            if both is not None and (extractor.layers or extractor.trunk):
                with self._in_its_mode():
                    return both.with_inner(x, self.w, len(extractor.layers), detach)
            z = self.features(x)
            return z, self.classify(z.detach() if detach else z)

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            z = net._extractor(x)
            return z, net._head(z.detach() if detach else z)

        found: tuple[Tensor, Tensor] = self._run(forward, x, net._slots, self.pieces)
        return found

    def logits_of_two(
        self, x: Tensor, head: Tensor, *, detach: Literal["own", "other"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the own and of other heads on the same features; as `features` and two `classify`.

        Same bits in less time (`features_and_logits`).

        Args:
            x: inputs `[K, B, ...]`.
            head: the other heads `[K or 1, head columns]`.
            detach: whose loss does not reach the extractor.
        """
        net = self.net
        if self.dense is not None:
            z, own = self.features_and_logits(x, detach=detach == "own")
            return own, self.classify(z.detach() if detach == "other" else z, head)
        head_slots = net._slots[: net._num_head_slots]

        def forward(x: Tensor, *other: Tensor) -> tuple[Tensor, Tensor]:
            z = net._extractor(x)
            own_logits = net._head(z.detach() if detach == "own" else z)
            with bound(head_slots, other, "_parameters"):
                return own_logits, net._head(z.detach() if detach == "other" else z)

        logits: tuple[Tensor, Tensor] = self._run(
            forward, x, net._slots, self.pieces, split(head, head_slots)
        )
        return logits

    def evaluating(self) -> Rows:
        """The same models in evaluation mode; their buffers are a copy, safe beside a training forward."""
        return self._replace(buffers=self.buffers.clone(), training=False)

    def _through(self, part: Dense, x: Tensor, w: Tensor) -> Tensor:
        with self._in_its_mode():
            return part(x, w)

    @contextmanager
    def _in_its_mode(self) -> Iterator[None]:
        # A trunk may have layers that only do something while models train.
        self.net.set_training(self.training)
        with self._arithmetic():
            yield

    def _arithmetic(self) -> AbstractContextManager[object]:
        return arithmetic(self.net.precision if self.training else "float32", self.net.device)

    def _run(
        self,
        forward: Callable[..., Any],
        x: Tensor,
        slots: Sequence[Slot],
        pieces: Sequence[Tensor],
        arguments: Sequence[Tensor] = (),
    ) -> Any:
        """`forward(x, *arguments)` of every model with `pieces` in its `slots`; arguments have rows, too."""
        net = self.net
        net.set_training(self.training)
        statistics = split(self.buffers, net._buffer_slots)

        # Not two nested arguments: vmap spends longer on taking them apart than a small layer takes.
        def one(x: Tensor, *tensors: Tensor) -> Any:
            own, rest = tensors[: len(slots)], tensors[len(slots) :]
            buffers, more = rest[: len(statistics)], rest[len(statistics) :]
            with bound(slots, own, "_parameters"), bound(net._buffer_slots, buffers, "_buffers"):
                return forward(x, *more)

        for pool in net._pools:
            pool.alone = len(x) == 1
        inputs = (*pieces, *statistics, *arguments)
        with self._arithmetic():
            out = self._of_all(one, x, inputs)
        if isinstance(out, Tensor):
            return out.to(net.dtype)
        return tuple(part.to(net.dtype) for part in out)

    def _of_all(self, one: Callable[..., Any], x: Tensor, inputs: tuple[Tensor, ...]) -> Any:
        if len(x) == 1:
            # One model needs no vmap, which would cost up to twice the time.
            alone = one(channels_last(x[0]) if self.net._channels_last else x[0], *inputs)
            return alone[None] if isinstance(alone, Tensor) else (alone[0][None], alone[1][None])
        batched: list[int | None] = [0 if len(rows) == len(x) else None for rows in inputs]
        # A single row is shared by all; `view(-1)`, since its backward copies nothing.
        flat = [rows if axis == 0 else rows.view(-1) for rows, axis in zip(inputs, batched, strict=True)]
        return torch.func.vmap(one, in_dims=(0, *batched), randomness="different")(x, *flat)


def _is_linear(head: nn.Module) -> bool:
    layers = list(head.children()) if isinstance(head, nn.Sequential) else [head]
    return len(layers) == 1 and isinstance(layers[0], nn.Linear)


def _refuse_unbindable(module: nn.Module) -> None:
    seen: dict[int, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _NormBase) and part.track_running_stats and not getattr(part, "rows_safe", False):
            raise ShapeError(
                f"module {path!r} is a {type(part).__name__}, whose running statistics are lost silently "
                "when several models run at once. Use raypfl.models.BatchNorm2d (or BatchNorm1d), or group "
                "norm."
            )
        for name, tensor in part._parameters.items():
            if tensor is None:
                continue
            here = f"{path}.{name}"
            if id(tensor) in seen:
                raise ShapeError(
                    f"parameters {seen[id(tensor)]!r} and {here!r} are one tensor; rows need them apart"
                )
            seen[id(tensor)] = here
