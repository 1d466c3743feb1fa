"""One of several servers loses what it has learnt since its last snapshot, as in section 2.3 of the paper. What does it cost?

Rows belong to servers by bucket, as they do on parameter servers. In the middle of the online part the rows of one server, with
their optimizer state, become what they were some time before. Training continues, serving copies are synced as always, and AUC is
compared with the same run without the fault, on the same events. Dense weights stay: they are the same on all workers.

`kill_servers` does the same to real servers: one is killed and comes back from its own folder, or from an old copy of it.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from freshbench.adapters.monolith_system import MonolithSystem, features_of
from freshbench.examples import DataSet, Examples
from freshbench.measure import online_secs
from freshbench.report import span
from freshbench.simulation import BATCH_SHARE, answers, aucs, train
from freshbench.verdict import Difference, difference
from monolith.ps import ServerStore, tables_of
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS
from monolith.table.changes import RawRows
from monolith.testing.parameter_servers import ServerProcess, server_process

SERVERS = 4
LOST = "lost, starts empty"
FAULT_AT = 0.5
"""The share of the online part before the fault."""
SYNCS_AFTER = 24
"""Serving copies are synced this often between fault and end: every hour."""
WINDOWS = (0, 1, 3, 6, 12, 24)
"""Parts of the time after the fault, in syncs, that AUC is reported for."""
AGES: tuple[float | None, ...] = (1 / 48, 6 / 48, 24 / 48, None)
"""How old the snapshot is, as a share of the online part: 1, 6 and 24 of 48 hours. None: there is no snapshot."""


@dataclass(frozen=True)
class State:
    """Rows and dense weights of a system, with optimizer state."""

    rows: Mapping[str, RawRows]
    model: Mapping[str, torch.Tensor]
    optimizer: dict[str, object]
    step: int

    @classmethod
    def of(cls, system: MonolithSystem, buckets: range = range(NUM_BUCKETS)) -> State:
        """Copy the state, of the tables only the rows of `buckets`."""
        trainer = system.trainer
        assert trainer.optimizer is not None
        return cls(
            {name: table.rows_of_buckets(buckets) for name, table in system.tables().items()},
            copy.deepcopy(dict(system.model.top.state_dict())),
            copy.deepcopy(trainer.optimizer.state_dict()),
            trainer.step,
        )

    def put_back(self, system: MonolithSystem) -> None:
        """Make the system what it was."""
        assert system.trainer.optimizer is not None
        replace_rows(system.tables(), self.rows, range(NUM_BUCKETS))
        system.model.top.load_state_dict(self.model)
        system.trainer.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        system.trainer.step = self.step


def replace_rows(tables: Mapping[str, EmbeddingTable], rows: Mapping[str, RawRows], buckets: range) -> int:
    """Make the rows of `buckets` those that are given. Returns how many rows are removed because they are not among them."""
    removed = 0
    for name, table in tables.items():
        wanted = rows[name]
        newer = np.setdiff1d(table.rows_of_buckets(buckets).ids, wanted.ids)
        if len(newer):
            table.erase(newer)
        table.insert_rows(wanted.ids, wanted.times, wanted.rows)
        removed += len(newer)
    return removed


def nothing(tables: Iterable[tuple[str, EmbeddingTable]]) -> dict[str, RawRows]:
    """Return no rows, for each table."""
    ids, times = np.empty(0, np.int64), np.empty(0, np.uint32)
    return {name: RawRows(ids=ids, times=times, rows=np.empty((0, t.row_bytes), np.uint8)) for name, t in tables}


@dataclass(frozen=True)
class FaultReport:
    """AUC, float [seeds, syncs after the fault], without it and by the age of the snapshot, and the rows that were removed."""

    data: str
    online_secs: float
    """How long the online part is. 0: not known."""
    without: np.ndarray
    after: Mapping[str, np.ndarray]
    removed: Mapping[str, float]

    def windows(self) -> list[tuple[int, int]]:
        """The parts of the time after the fault, in syncs."""
        return list(itertools.pairwise(WINDOWS))

    def after_syncs(self, syncs: int) -> str:
        """Return how long after the fault so many syncs are, for people."""
        return "0" if not syncs else span(syncs / SYNCS_AFTER * (1 - FAULT_AT), self.online_secs)

    def window(self, first: int, end: int) -> str:
        """Return the time between two syncs after the fault, for people."""
        if not first or self.online_secs:
            return f"{self.after_syncs(first)} to {self.after_syncs(end)}"
        return f"{first / SYNCS_AFTER * (1 - FAULT_AT):.2g} to {self.after_syncs(end)}"

    def cost(self, age: str, first: int, end: int) -> Difference:
        """Compare AUC between two syncs after the fault with that of the run without it."""
        return difference(self.after[age][:, first:end], self.without[:, first:end])

    def recovered_after(self, age: str) -> int | None:
        """Return the syncs until the loss is not shown any more, in none of the later windows either. None: it is still there."""
        syncs = max((end for first, end in self.windows() if self.cost(age, first, end).is_contradicted), default=0)
        return None if syncs == SYNCS_AFTER else syncs

    def markdown(self) -> str:
        """Return the table."""
        heads = [self.window(first, end) for first, end in self.windows()]
        lines = [
            f"### A fault: one of {SERVERS} servers restored from an old snapshot, {self.data}",
            "",
            f"Points of AUC against the same run without the fault, by the time since the fault. {len(self.without)} seeds.",
            "",
            f"| snapshot | rows that it does not have | {' | '.join(heads)} | loss is no longer shown after |",
            f"|---|---:|{'---:|' * len(heads)}---:|",
        ]
        for age in self.after:
            costs = " | ".join(str(self.cost(age, first, end)) for first, end in self.windows())
            syncs = self.recovered_after(age)
            last = "not within the data" if syncs is None else "never shown" if not syncs else self.after_syncs(syncs)
            lines.append(f"| {age} | {self.removed[age]:,.0f} | {costs} | {last} |")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Return everything that was measured."""
        return {
            "data": self.data,
            "online_secs": self.online_secs,
            "without": self.without.tolist(),
            "after": {age: values.tolist() for age, values in self.after.items()},
            "rows_removed": dict(self.removed),
        }


def lose_a_server(
    make: Callable[[int], DataSet], seeds: int, tell: Callable[[str, float], None] = lambda what, share: None
) -> FaultReport:
    """Restore one of four servers from snapshots of all `AGES` and return what it costs."""
    without: list[np.ndarray] = []
    after: dict[float | None, list[np.ndarray]] = {age: [] for age in AGES}
    removed: dict[float | None, list[int]] = {age: [] for age in AGES}
    for seed in range(seeds):
        tell(f"fault, seed {seed}", seed / seeds)
        data = make(seed)
        first = round(len(data.examples) * BATCH_SHARE)
        online = data.examples.between(first, len(data.examples))
        fault = round(len(online) * FAULT_AT)
        buckets = range(seed % SERVERS * NUM_BUCKETS // SERVERS, (seed % SERVERS + 1) * NUM_BUCKETS // SERVERS)
        system = MonolithSystem(data.schema, seed)
        train(system, data.examples.between(0, first), data.batch_size)
        snapshots: dict[float | None, Mapping[str, RawRows]] = {None: nothing(system.tables().items())}
        trained = 0
        for age in sorted((age for age in AGES if age is not None), reverse=True):
            moment = max(0, fault - round(age * len(online)))
            train(system, online.between(trained, moment), data.batch_size)
            snapshots[age], trained = State.of(system, buckets).rows, moment
        train(system, online.between(trained, fault), data.batch_size)
        now, rest = State.of(system), online.between(fault, len(online))
        without.append(_aucs_after(system, data, rest))
        for age in AGES:
            now.put_back(system)
            removed[age].append(replace_rows(system.tables(), snapshots[age], buckets))
            after[age].append(_aucs_after(system, data, rest))
        system.close()
    names = {age: LOST if age is None else f"{span(age, online_secs(data))} ago" for age in AGES}
    return FaultReport(
        data=data.name,
        online_secs=online_secs(data),
        without=np.stack(without),
        after={names[age]: np.stack(found) for age, found in after.items()},
        removed={names[age]: float(np.mean(counts)) for age, counts in removed.items()},
    )


def _aucs_after(system: MonolithSystem, data: DataSet, rest: Examples) -> np.ndarray:
    """Train on the rest, and return the AUC between each two syncs."""
    serving = system.serving()
    scores = []
    for begin, end in itertools.pairwise(len(rest) * part // SYNCS_AFTER for part in range(SYNCS_AFTER + 1)):
        part = rest.between(begin, end)
        serving.sync()
        scores.append(answers(serving, part))
        train(system, part, data.batch_size)
    return aucs(rest.labels, np.concatenate(scores), SYNCS_AFTER)


@dataclass(frozen=True)
class KillReport:
    """What a kill of a real server does to the next answers: the scores that differ from those of a run without a kill."""

    data: str
    events: int
    differ: Mapping[str, int]
    auc: Mapping[str, float]

    def markdown(self) -> str:
        """Return the table."""
        lines = [
            f"### Real servers: one of two is killed (SIGKILL) and started again, {self.data}",
            "",
            f"| started again from | answers that differ, of {self.events:,} | AUC of those answers |",
            "|---|---:|---:|",
        ]
        lines += [f"| {name} | {count:,} | {self.auc[name]:.4f} |" for name, count in self.differ.items()]
        return "\n".join(lines)


FOLDERS = ("no kill", "its folder: every acknowledged update", "a copy of its folder from the middle of training")


def kill_servers(data: DataSet, seed: int = 0) -> KillReport:
    """Train on two `monolith ps` processes, kill one, start it again, and compare the next answers with those without a kill."""
    first = round(len(data.examples) * BATCH_SHARE)
    asked = data.examples.between(first, len(data.examples))
    scores = {name: _after_a_kill(data, seed, asked, name) for name in FOLDERS}
    calm = scores[FOLDERS[0]]
    return KillReport(
        data.name,
        len(asked),
        {name: int((found != calm).sum()) for name, found in scores.items()},
        {name: float(aucs(asked.labels, found, 1)[0]) for name, found in scores.items()},
    )


def _after_a_kill(data: DataSet, seed: int, asked: Examples, kind: str) -> np.ndarray:
    first = round(len(data.examples) * BATCH_SHARE)
    with tempfile.TemporaryDirectory() as base, ExitStack() as stack:
        folders = [Path(base) / "ps" / str(number) for number in range(2)]
        old = Path(base) / "old"
        servers = [stack.enter_context(server_process("--folder", str(folder))) for folder in folders]
        system = _on_servers(data, seed, servers, stack)
        train(system, data.examples.between(0, first // 2), data.batch_size)
        # Every push is acknowledged when it is durable, so the folder of a server that is not asked anything is whole.
        shutil.copytree(folders[0], old)
        train(system, data.examples.between(first // 2, first), data.batch_size)
        if kind != FOLDERS[0]:
            servers[0].kill()
            if kind == FOLDERS[2]:
                shutil.rmtree(folders[0])
                shutil.copytree(old, folders[0])
            servers[0].restart()
        # A new worker, as a serving process would be, with the dense weights of the old one.
        fresh = _on_servers(data, seed, servers, stack)
        fresh.model.top.load_state_dict(system.model.top.state_dict())
        return answers(_Direct(fresh), asked)


def _on_servers(data: DataSet, seed: int, servers: Sequence[ServerProcess], stack: ExitStack) -> MonolithSystem:
    addresses = [server.address for server in servers]
    store = stack.enter_context(closing(ServerStore(addresses, tables_of(features_of(data.schema), seed=seed))))
    return MonolithSystem(data.schema, seed, store)


class _Direct:
    """Answers with the model itself."""

    def __init__(self, system: MonolithSystem) -> None:
        self._system = system

    def sync(self) -> None:
        pass

    def predict(self, examples: Examples) -> np.ndarray:
        return self._system.scores(examples)
