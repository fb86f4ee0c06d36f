"""The engine without Ray: hub and hosts in this process, one after another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

from raypfl.data import Pool
from raypfl.engine.contract import RoundReport
from raypfl.engine.dealing import deal, ids_of
from raypfl.engine.host import ClientHost
from raypfl.engine.hub import Hub
from raypfl.engine.reports import StepReport, round_report
from raypfl.engine.world import World, settled_arithmetic, training_device
from raypfl.records.manifest import Part
from raypfl.records.storage import Place


class LocalEngine:
    """Runs a world in this process; `engine.num_actors` hosts if asked for (for tests), else one."""

    def __init__(self, world: World, pool: Pool) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(settled_arithmetic(world.config.engine.threads))
        device = training_device(world.config)
        dealt = deal(world, world.config.engine.num_actors or 1)
        self.hub = Hub(world, [ids_of(world, blocks) for blocks in dealt], device)
        self.hosts = [ClientHost(world, blocks, pool.x, pool.y, device) for blocks in dealt]

    def round(
        self, round: int, *, evaluate_pre: bool, evaluate_post: bool, away: Collection[int] = ()
    ) -> RoundReport:
        steps: list[StepReport] = []
        while not steps or steps[-1].opening.more:
            opening, work = self.hub.open(
                round, train=True, evaluate_pre=evaluate_pre, evaluate_post=evaluate_post, away=away
            )
            done = [host.work(own) for host, own in zip(self.hosts, work, strict=True)]
            closing = self.hub.close([upload for uploads, _ in done for upload in uploads])
            steps.append(StepReport(opening, [report for _, report in done], closing))
        return round_report(steps, clock=self.hub.timing is not None, over_hosts=sum)

    def evaluate(self, round: int) -> RoundReport:
        opening, work = self.hub.open(round + 1, train=False, evaluate_pre=True, evaluate_post=False)
        reports = [host.work(own)[1] for host, own in zip(self.hosts, work, strict=True)]
        records = [block for report in reports for block in report.clients]
        evaluating = sum(report.evaluation_seconds for report in reports)
        working = sum(report.seconds for report in reports)
        return RoundReport(records, [], {}, 0, opening.seconds, evaluating, working)

    def save(self, building: Place) -> Sequence[Part]:
        parts = [host.save(building, f"state-{number:03d}") for number, host in enumerate(self.hosts)]
        return [*self.hub.save(building), *parts]

    def restore(self, checkpoint: Place | None) -> None:
        self.hub.restore(checkpoint)
        for host in self.hosts:
            host.restore(checkpoint)

    def close(self) -> None:
        self._stack.close()
