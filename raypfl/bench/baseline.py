"""The plain PyTorch loop: modules, `torch.optim`, shuffled batches; clients split over processes.

What one would write by hand for many small models on a CPU, and the fastest of the loops and simulators
that were measured there. It trains and evaluates; there is no server and nothing is exchanged.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F

from raypfl.bench.workloads import LR, SEED, Workload
from raypfl.models import build
from raypfl.rng import key, torch_seeded


class PlainClient:
    """One client: its module and its tensors."""

    def __init__(self, workload: Workload, client: int) -> None:
        x, y = map(torch.from_numpy, workload.samples(client))
        cut = workload.train_samples
        self._train, self._test = (x[:cut], y[:cut]), (x[cut:], y[cut:])
        self._workload = workload
        with torch_seeded(key(SEED, "init")):
            self.module = build(workload.config().model, workload.input_shape, workload.num_classes).module

    def train(self) -> None:
        """One round of local training."""
        x, y = self._train
        optimizer = torch.optim.Adam(self.module.parameters(), lr=LR)
        self.module.train()
        for _ in range(self._workload.epochs):
            for rows in torch.randperm(len(x)).split(self._workload.batch_size):
                loss = F.cross_entropy(self.module(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def accuracy(self) -> float:
        """On the client's test samples."""
        x, y = self._test
        self.module.eval()
        with torch.no_grad():
            return float((self.module(x).argmax(1) == y).float().mean())


class PlainProcesses:
    """One-thread processes that share the clients out and stay alive from round to round."""

    def __init__(self, workload: Workload, num_processes: int) -> None:
        # Not fork: torch's and Ray's threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(num_processes):
            here, there = context.Pipe()
            clients = range(number, workload.num_clients, num_processes)
            process = context.Process(target=_serve, args=(there, workload, clients), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._receive()

    def round(self, round: int) -> None:
        """Train and evaluate every client once."""
        for pipe in self._pipes:
            pipe.send(round)
        self._receive()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def _receive(self) -> None:
        for pipe in self._pipes:
            pipe.recv()


def _serve(pipe: Connection, workload: Workload, ids: Sequence[int]) -> None:
    """A process: rounds as they are asked for, until the pipe is closed."""
    torch.set_num_threads(1)
    clients = [PlainClient(workload, client) for client in ids]
    pipe.send(None)
    while True:
        try:
            round = pipe.recv()
        except EOFError:
            return
        with torch_seeded(key(SEED, "bench batches", round, ids[0])):
            for client in clients:
                client.train()
        pipe.send([client.accuracy() for client in clients])
