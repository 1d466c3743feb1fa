"""`SynchronousSteps`: how a trainer makes its steps together with the other ranks of a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from monolith.data.prefetch import Prefetch
from monolith.errors import ConfigError, DivergedError, RanksDisagreeError
from monolith.features.batch import Batch, as_batch, num_rows
from monolith.nn import dense_state_dict, embedding_collections
from monolith.nn.heads import sums_over_examples
from monolith.ranks.agreement import Agreement, StepPlan
from monolith.ranks.data_shards import DataShards, PartsAhead, ShardBatches, join_positions, shards_of_position
from monolith.ranks.dense import AllReduce, DenseGradients, SharedBuffers, StepPart, dense_digest
from monolith.ranks.rank_store import RankStore
from monolith.ranks.row_exchange import GradientPart
from monolith.ranks.states import broadcast_state, gather_states
from monolith.table.store import Position
from monolith.train.processors import use_threads
from monolith.train.waiting import Pause, waits_for_records

if TYPE_CHECKING:
    from collections.abc import Iterable

    from monolith.train.distributed.config import RunnerConfig
    from monolith.train.hooks.hook import Moments
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["SynchronousSteps"]

START, END = "start", "end"
"""What ranks other than the chief wait for: that it has restored, and that it has ended its run."""

_log = logging.getLogger(__name__)
IDLE_SECS = 0.02
"""Seconds that each rank waits for a batch while none of them has one."""
_NEWS_SECS = 10.0
"""Seconds after an error of torch within which the mesh notices too that a rank has ended."""
# What every rank is told about each part of a step, before the squares of the tables.
_ROWS, _LOSS, _NORM, _TIME, _RANK, _SQUARES = range(6)


class SynchronousSteps:
    """Makes the steps of `trainer` together with those of all other ranks: one global batch, one update of all parameters.

    A step: the ranks agree on it, each makes forward and backward passes over its own batches, dense gradients are added over all
    ranks, all gradients are clipped by the norm of the global batch, and every rank changes its dense parameters alike. Rows are
    changed by their owners. Losses that are means over a batch are weighted by its rows, so that the result is that of one
    process with the whole batch.

    Args:
        trainer: of this rank. Its `ranks` becomes this object.
        agreement: of this rank.
        config: the settings of synchronous runs in it.
        store: with the rows, if they are spread over the ranks.
        group: adds dense gradients, in place of the mesh.
    """

    def __init__(
        self,
        trainer: Trainer,
        agreement: Agreement,
        config: RunnerConfig,
        *,
        store: RankStore | None = None,
        group: AllReduce | None = None,
    ) -> None:
        self.agreement = agreement
        self._trainer, self._mesh, self._config, self._store = trainer, agreement.mesh, config, store
        self._collections = embedding_collections(trainer.model)
        self._dense = DenseGradients(trainer.model, self._mesh, wire=config.dense_wire, group=group)
        self._buffers = SharedBuffers(trainer.model, self._mesh)
        self._loss_is_sum = sums_over_examples(trainer.heads)
        self._passes: list[tuple[int, list[int]]] = []
        self._state: dict[str, object] | None = None
        self._joined: object = None
        self._data: tuple[object, DataShards] | None = None
        self._waits = False
        agreement.actions.update(
            {"settle": self._settle_here, "positions": self._gather_positions, "state": self._share_state}
        )
        if config.enable_pipelined_bwda2a or config.enable_async_optimize:
            trainer.push.delayed = True
        self._require_possible()
        if config.micro_batches is not None and trainer.config.threads is None:
            # Kernels of torch add in another order with other numbers of threads, which depend on the ranks of a machine.
            use_threads(1)
        if config.reorder_fids_in_data_pipeline:
            _log.info("reorder_fids_in_data_pipeline has no effect: the exchange sorts ids by owner, in native code")
        if store is not None:
            store.delayed_push = trainer.push.delayed
        trainer.ranks = self

    def _require_possible(self) -> None:
        config = self._config
        reductions = {head.reduction for head in self._trainer.heads}
        if len(reductions) > 1 and (self._mesh.size > 1 or config.micro_batches is not None):
            raise ConfigError(
                "heads: expected one reduction, got 'sum' and 'mean': losses of ranks are added or averaged, all of them alike"
            )
        if self._dense.reduced_by_torch and config.end_of_data == "drain" and self._mesh.size > 1:
            raise ConfigError(
                "RunnerConfig.end_of_data: expected 'stop', because a part of the model is in DistributedDataParallel: a rank "
                "whose data has ended makes no backward pass, in which torch would wait for it"
            )
        if config.micro_batches is None:
            return
        for setting, wrong in (
            ("enable_embedding_postpush, enable_pipelined_bwda2a or enable_async_optimize", self._trainer.push.delayed),
            ("enable_pipelined_fwda2a", config.enable_pipelined_fwda2a),
            ("DistributedDataParallel", bool(self._dense.reduced_by_torch)),
        ):
            if wrong:
                raise ConfigError(
                    f"RunnerConfig.micro_batches: {setting} cannot be used with it: sums would not be in the order of its batches"
                )
        if config.micro_batches % self._mesh.size:
            raise ConfigError(
                f"RunnerConfig.micro_batches: expected a multiple of the {self._mesh.size} ranks, got {config.micro_batches}"
            )

    def _require_stream_possible(self, source: Iterable[Batch]) -> None:
        what = f"a {type(source).__name__}, which waits for records"
        if self._config.micro_batches is not None:
            raise ConfigError(
                f"RunnerConfig.micro_batches: cannot be used with {what}: its batches are cut by time, so that results depend on "
                "it in any case. Leave it unset"
            )
        if self._dense.reduced_by_torch and self._mesh.size > 1:
            raise ConfigError(
                f"source: with {what}, no part of the model can be in DistributedDataParallel: a rank without a batch makes no "
                "backward pass, in which torch would wait for it"
            )

    @property
    def is_chief(self) -> bool:
        """Whether this rank restores and saves."""
        return self._mesh.rank == 0

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self._mesh.size

    # The run

    def divided(self, source: Iterable[Batch], position: object) -> Iterable[Batch]:
        """Return the data of this rank, which `make_pass` reads.

        The number of shards is that of the run whose `position` was restored, if neither of the settings says another one. A
        source that waits has one for each rank: its position does not depend on their number.
        """
        config = self._config
        if self._data is None or self._data[0] is not source:
            self._waits = waits_for_records(source)
            if self._waits:
                self._require_stream_possible(source)
                shards = self._mesh.size
                if config.data_shards not in (None, shards) and self.is_chief:
                    _log.warning(
                        "data_shards=%s has no effect on a stream, whose partitions %d ranks divide, and any other number later",
                        config.data_shards,
                        shards,
                    )
            else:
                shards = config.micro_batches or config.data_shards or shards_of_position(position) or self._mesh.size
            own = DataShards(
                source,
                shards=shards,
                rank=self._mesh.rank,
                ranks=self._mesh.size,
                together=config.micro_batches is not None,
            )
            # The same one for the same data, so that a second run continues where the first has stopped.
            self._data = (source, own)
        return cast("Iterable[Batch]", self._data[1])

    def send_start(self) -> None:
        """Give the others the state that the chief has restored or built, and let them begin."""
        trainer = self._trainer
        self._state = trainer.state_dict(position=trainer.loaded_position)
        self.agreement.run("state")
        self._state = None
        self.agreement.release(START)
        self._begin()

    def receive_start(self) -> None:
        """Wait until the chief has restored, and continue from its state."""
        self.agreement.serve(START)
        self._begin()
        seed = self._trainer.config.seed
        if seed is not None:
            # Ranks drop out other elements than each other.
            torch.manual_seed(_seed_of(seed, self._trainer.step, self._mesh.rank))

    def _begin(self) -> None:
        self.agreement.step = self._trainer.step

    def _share_state(self, _: JsonValue) -> None:
        state = broadcast_state(self._mesh, self._state, step=self.agreement.step)
        if self._state is None:
            given = cast("dict[str, Any]", state)
            self._require_same_model(given["model"])
            self._trainer.dense.declare()
            self._trainer.load_state_dict(given)

    def _require_same_model(self, given: dict[str, Any]) -> None:
        own = dense_state_dict(self._trainer.model)
        here, there = ({name: _what(value) for name, value in one.items()} for one in (own, given))
        wrong = [
            f"{name} is {here.get(name, 'missing')} here and {there.get(name, 'missing')} there"
            for name in {**there, **here}
            if here.get(name) != there.get(name)
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise RanksDisagreeError(
                f"rank {self._mesh.rank} has another model than rank 0: {', '.join(wrong[:3])}{more}. All ranks must build the "
                "same model: look for settings or data that differ between them"
            )

    def end_run(self) -> None:
        """The run is over here. Ranks other than the chief serve it until it has ended, too: it may still be saving."""
        if self.is_chief:
            self.agreement.release(END)
        else:
            self.agreement.serve(END)

    def make_pass(self, ahead: Prefetch, last: int | None, moments: Moments) -> int:
        """Train on one pass over the data of all ranks, or until the run stops. Returns the number of examples."""
        try:
            return self._make_pass(ahead, last, moments)
        except BaseException as error:
            # At once: the others wait for this rank.
            self._mesh.fail(f"{type(error).__name__}: {error}")
            raise

    def _make_pass(self, ahead: Prefetch, last: int | None, moments: Moments) -> int:
        trainer, examples = self._trainer, 0
        before, after = moments.before_step, moments.after_step
        # How much each rank gets of a stream is chance: one whose part has ended must not cut off the others.
        stops_early = self._config.end_of_data == "stop" and not ahead.waits
        reading = PartsAhead(ahead, sees_last=stops_early)
        trainer.read_from(reading)
        hooks = moments.while_waiting
        pause = Pause(trainer, hooks=hooks, last=last, source=ahead) if ahead.waits else None
        patience = IDLE_SECS
        if self.is_chief:
            # The others answer while they agree on the first step.
            trainer.save_start()
        while True:
            if last is not None and trainer.step >= last:
                trainer.request_stop(f"step {last} is reached")
            if trainer.stop_reason is None:
                for hook in before:
                    hook.before_step(trainer)
            plan, parts = self._agree(reading, patience if ahead.waits else None)
            if pause is not None:
                # Only while all ranks wait: one that has nothing must not delay those that have.
                patience = IDLE_SECS if plan.waits else 0.0
                if plan.waits and not plan.stops:
                    self._pause(pause)
                    continue
                pause.over()
            over = plan.is_over or (stops_early and any(plan.ended))
            if plan.stops or over:
                self.agreement.step_ended()
                self._stop(plan) if plan.stops else self._tell_end(plan)
                return examples
            if trainer.steps_made == 0 and plan.ended[self._mesh.rank] and pause is None:
                self._tell_idle()
            if parts:
                reading.take()
                trainer.tell_position()
            result = self._step(parts, plan, reading)
            examples += result.examples
            trainer.steps_made += 1
            self.agreement.step = trainer.step
            self.agreement.step_ended()
            for hook in after:
                hook.after_step(trainer, result)
            if stops_early and plan.last:
                self._tell_end(plan)
                return examples

    def _pause(self, pause: Pause) -> None:
        """What all ranks do while none of them has a batch."""
        with self.agreement.acting():
            self._trainer.settle(here=True)
        self.agreement.step_ended()
        pause.tick()

    def _agree(self, reading: PartsAhead, patience: float | None = None) -> tuple[StepPlan, ShardBatches]:
        """Agree on the next step. `patience` is how many seconds to wait for a batch of a source that waits."""
        trainer = self._trainer
        # A rank that stops draws no batch.
        drawn: ShardBatches | None = None
        if trainer.stop_reason is None:
            drawn = reading.peek() if patience is None else reading.peek_arrived(patience)
        parts = [(number, as_batch(batch)) for number, batch in drawn or ()]
        plan = self.agreement.next_step(
            rows=sum(num_rows(batch) for _, batch in parts),
            parts=len(parts),
            ended=not drawn and (drawn is None or patience is None),
            last=reading.is_last,
            stop=trainer.stop_reason,
            interrupted=trainer.interrupted is not None,
        )
        return plan, parts

    def _stop(self, plan: StepPlan) -> None:
        rank, reason = next(iter(plan.stops.items()))
        if self._trainer.stop_reason is None and plan.interrupted:
            self._trainer.interrupt(f"rank {rank}: {reason}")
        self._trainer.request_stop(f"rank {rank}: {reason}")

    def _tell_idle(self) -> None:
        _log.warning(
            "rank %d of %d has no data in this pass and only serves rows: its data shards are empty, or were read before the run "
            "was continued. Data in more files, or Parquet row groups, than ranks is divided better",
            self._mesh.rank,
            self._mesh.size,
        )

    def _tell_end(self, plan: StepPlan) -> None:
        if not plan.is_over and self.is_chief and self._mesh.size > 1:
            _log.info(
                "the data of a rank has ended at step %d, and all ranks stop with it: end_of_data is 'stop'",
                self._trainer.step,
            )

    def end_pass(self, ahead: Prefetch, source: Iterable[Batch]) -> None:
        """Let the next pass begin with the first batch of every shard."""
        ahead.close()
        if not self._waits:
            cast("DataShards", source).restart()

    def drain(self) -> None:
        """Apply what waits for the next step when there is none. All ranks do it together."""
        with self.agreement.acting():
            self._trainer.push.drain()

    # One step

    def _step(self, parts: ShardBatches, plan: StepPlan, reading: PartsAhead) -> StepResult:
        trainer = self._trainer
        if self._buffers.any:
            self._buffers.begin()
        made = [self._make_part(number, batch, plan, first=not at) for at, (number, batch) in enumerate(parts)]
        if len(parts) < max(plan.parts):
            self._follow(first=not parts)
        delayed = trainer.push.delayed
        if delayed and not parts:
            trainer.push.start()
        if not delayed:
            self._look_ahead(reading)
        facts = self._dense.add([part for part, _, _ in made], step=self.agreement.step)
        if self._buffers.any:
            weights = self._weights(facts[:, _ROWS], plan)
            self._buffers.share([buffers for _, buffers, _ in made], weights=weights, step=self.agreement.step)
        if delayed:
            trainer.push.finish()
            # Only now, so that the rows of the next batch lack exactly the update of this step.
            self._look_ahead(reading)
        squares = facts[:, _SQUARES:]
        if self._config.clip_before_reduce:
            clipped = trainer.config.clip_norm is not None
            norm = torch.tensor(float(facts[:, _NORM].max())) if clipped else None
        else:
            norm = trainer.clip(_sum(squares))
        loss = torch.tensor(float(_sum(facts[:, _LOSS])))
        event_time = int(facts[:, _TIME].max())
        trainer.event_time = max(trainer.event_time, event_time)
        try:
            trainer.update(loss, norm, event_time)
        except DivergedError as error:
            raise self._named(error, facts) from None
        if parts:
            trainer.last_batch = parts[-1][1]
        return self._result(loss, norm, plan, parts, [logits for _, _, logits in made])

    def _make_part(
        self, number: int, batch: Batch, plan: StepPlan, *, first: bool
    ) -> tuple[StepPart, tuple[int, dict[int, Tensor]], dict[str, Tensor]]:
        trainer = self._trainer
        if self._config.micro_batches is not None:
            # What is random in a forward pass must not depend on the rank that makes it.
            torch.manual_seed(_seed_of(trainer.config.seed or 0, trainer.step, number))
        if self._buffers.any and not first:
            self._buffers.begin(restore=True)
        passes = [0 if first else collection.num_passes for collection in self._collections]
        rows = num_rows(batch)
        share = rows / max(plan.total_rows, 1)
        batch, loss, logits = trainer.pass_forward(batch, first=first, share=share if self._loss_is_sum else 1.0)
        if first and trainer.push.delayed:
            trainer.push.start()
        weight = 1.0 if self._loss_is_sum else share
        if loss.requires_grad:
            self._backward(loss, weight)
        # A batch without rows has no weight, and nothing to clip.
        norm = trainer.clip(weight=weight) if self._config.clip_before_reduce and weight else None
        pairs = zip(self._collections, passes, strict=True)
        wanted = trainer.config.clip_norm is not None and not self._config.clip_before_reduce
        squares = [collection.gradient_squares(since=since) for collection, since in pairs if wanted]
        column = trainer.config.event_time
        facts = np.concatenate(
            [
                [
                    rows,
                    loss.item() * weight,
                    0.0 if norm is None else norm.item() / weight,
                    0 if column is None else trainer.event_time_of(batch, column),
                    self._mesh.rank,
                ],
                *squares,
            ]
        )
        self._passes.append((number, [collection.num_passes for collection in self._collections]))
        return (
            self._dense.take(number, facts=facts),
            self._buffers.take(number) if self._buffers.any else (number, {}),
            {name: tensor.detach() for name, tensor in logits.items()},
        )

    def _backward(self, loss: Tensor, weight: float) -> None:
        try:
            torch.autograd.backward(loss, torch.full_like(loss, weight))
        except RuntimeError as error:
            # In it torch adds the gradients of DistributedDataParallel, and has no type of error for the end of another rank.
            step = self.agreement.step
            lost = self._mesh.loss(step=step, wait_secs=_NEWS_SECS) if self.needs_whole_group else None
            if lost is None:
                raise
            raise lost from error

    @property
    def needs_whole_group(self) -> bool:
        """Whether torch adds gradients of this model by itself, in a process group that does not survive a lost rank."""
        return bool(self._dense.reduced_by_torch) and self._mesh.size > 1

    def _named(self, error: DivergedError, facts: np.ndarray) -> DivergedError:
        """Return `error` with the ranks whose batches are to blame, if that can be seen."""
        wrong = ~np.isfinite(facts).all(axis=1)
        ranks = ", ".join(str(rank) for rank in sorted({int(rank) for rank in facts[wrong, _RANK]}))
        return DivergedError(f"{error}. Not finite on rank {ranks}") if ranks and self._mesh.size > 1 else error

    def _look_ahead(self, reading: PartsAhead) -> None:
        """Begin to look up the rows of the next batch, which so lack the update of this step. All ranks do it, or none."""
        if not self._config.enable_pipelined_fwda2a or self._store is None:
            return
        following = reading.peek_arrived(0.0) if self._waits else reading.peek()
        for collection in self._collections:
            if not following:
                self._store.prefetch(())
            for _, batch in following or ():
                self._store.prefetch(collection.plan.bags(as_batch(batch)).packed)

    def _follow(self, *, first: bool) -> None:
        """Answer the lookups of ranks that have more batches in this step."""
        if first:
            # Nothing of the last step may be applied again.
            self._trainer.model.zero_grad(set_to_none=True)
            for collection in self._collections:
                collection.discard_gradients()
        if self._store is not None:
            self._store.follow_lookups()

    def _weights(self, rows: np.ndarray, plan: StepPlan) -> list[float]:
        return [count / max(plan.total_rows, 1) for count in rows.tolist()]

    def push(self, step: int, event_time: int, position: Position | None = None) -> None:
        """Send the sparse gradients of this step to their owners, who apply those of all ranks."""
        passes, self._passes = self._passes, []
        if self._config.micro_batches is None or self._store is None:
            self._trainer.push.push(step, event_time, position)
            return
        scheduled = self._trainer.config.schedule_step(step)
        taken = [collection.take_passes(scheduled) for collection in self._collections]
        parts, since = [], [0] * len(taken)
        for number, until in passes:
            chosen = zip(taken, since, until, strict=True)
            gradients = [one for all_, first, end in chosen for packed in all_[first:end] for one in packed]
            parts.append(GradientPart(number=number, gradients=gradients))
            since = until
        self._store.apply_parts(parts, step=step, event_time=event_time)

    def _result(
        self, loss: Tensor, norm: Tensor | None, plan: StepPlan, parts: ShardBatches, logits: list[dict[str, Tensor]]
    ) -> StepResult:
        from monolith.data.transforms.rows import concat_rows
        from monolith.train.trainer import StepResult

        batches = [batch for _, batch in parts]
        several = len(batches) > 1
        return StepResult(
            step=self._trainer.step,
            loss=loss,
            grad_norm=norm,
            logits={n: torch.cat([one[n] for one in logits]) for n in logits[0]} if several else dict(*logits[:1]),
            batch=concat_rows(batches) if several else dict(*batches[:1]),
            examples=plan.total_rows,
            loss_is_sum=self._loss_is_sum,
        )

    # Between two steps

    def settle(self) -> None:
        """Apply all updates that wait for the next step, on all ranks, and check that they have the same dense parameters.

        Raises:
            RanksDisagreeError: ranks have different dense parameters, and are named.
        """
        digests = self.agreement.run("settle")
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RanksDisagreeError(
                f"ranks {others} have other dense parameters than rank 0 after step {self._trainer.step}: something changes them "
                "outside of the steps that all ranks make, or computes otherwise there"
            )

    def _settle_here(self, _: JsonValue) -> str:
        self._trainer.settle(here=True)
        return dense_digest(dense_state_dict(self._trainer.model).items())

    def positions(self) -> object:
        """Return the positions in the data of all ranks."""
        self.agreement.run("positions")
        return self._joined

    def _gather_positions(self, _: JsonValue) -> None:
        states = gather_states(self._mesh, self._trainer.position, step=self.agreement.step)
        self._joined = join_positions(cast("list[dict[str, Any] | None]", states))


def _what(value: object) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else "there"


def _seed_of(seed: int, step: int, number: int) -> int:
    return ((seed * 1_000_003 + step) * 1_000_003 + number) % 2**63


def _sum(values: np.ndarray) -> np.ndarray:
    """Add along the first axis in its order: the same bits however the parts are spread over ranks."""
    total = np.zeros(values.shape[1:])
    for row in values:
        total = total + row
    return total
