"""`RolloutRouter`: divides the requests of a model between its versions, judges them by labels, and rolls back."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from monolith.console import RareWarnings
from monolith.errors import InvalidArgumentError, ModelNotFoundError, MonolithError, StorageError
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.rollout.labels import PredictionMemory, ServedLabel
from monolith.serve.rollout.moments import RollbackTarget, moment_of
from monolith.serve.rollout.observer import ServedQuality
from monolith.serve.rollout.plan import ModelRollout, RolloutEvent, RolloutFile, RolloutPlan, RolloutState
from monolith.serve.server.routing import Answered, ReplicaRoute

__all__ = ["RolloutRouter"]

_log = logging.getLogger(__name__)


class RolloutRouter:
    """Chooses versions by the plan of each model. A `Router`, and an `Observer` of its answers. Thread-safe.

    A model without a plan is answered by its default version. A request that names a version gets that version. The state is
    in `folder`, and is durable before a change is answered. One server at a time may use a folder.

    Args:
        repository: The replicas.
        folder: Where rollout.json is. It is created if needed.
        memory: Remembers predictions until their labels come.
        targets: By model, what can go back to an earlier moment of the run that it follows.
        open_version: Returns a replica of a model and version that is ready to answer, or raises `ModelNotFoundError`. With
            it, the versions of a plan are loaded before the plan comes into force, and others of the model are removed.
        clock: Seconds that never go back. The same as that of `memory`.
        now: Seconds since 1970.

    Example:
        >>> import tempfile
        >>> from monolith.serve.repository import ModelRepository
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     router = RolloutRouter(ModelRepository(), folder)
        ...     router.status()["models"]
        ...     router.close()
        {}
    """

    def __init__(
        self,
        repository: ModelRepository,
        folder: str | Path,
        *,
        memory: PredictionMemory | None = None,
        targets: Mapping[str, RollbackTarget] | None = None,
        open_version: Callable[[str, int], Replica] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._repository, self._open_version = repository, open_version
        self._clock, self._now = clock, now
        self.memory = memory or PredictionMemory(clock=clock)
        """The served predictions that wait for labels."""
        self._served = ServedQuality(repository, self.memory, clock=clock)
        self._board = self._served.board
        self.targets = dict(targets or {})
        """By model, what can go back to an earlier moment. Set one before requests come."""
        self._changes = threading.RLock()
        self._loading = threading.Lock()
        self._warnings = RareWarnings(_log, seconds=60)
        self._saved = True
        self._file = RolloutFile(Path(folder))
        self._state = self._file.read()
        for name, rollout in self._state.models.items():
            self._board.restart(rollout.plan, clock())
            for version in rollout.loaded:
                try:
                    self._load(name, (version,))
                except MonolithError as error:
                    _log.error("model %r: version %d of its rollout is not served: %s", name, version, error)
            self._follow_default(rollout.plan)
            _log.info("model %r: rollout continues: %s", name, rollout.plan.describe())

    # --- Router ------------------------------------------------------------------------------------------------------

    def route(self, name: str, version: int | None, key: str) -> ReplicaRoute:
        """Return the replica of `version`, or those that the plan of the model has for `key`."""
        rollout = self._state.models.get(name)
        if version is not None or rollout is None:
            return ReplicaRoute(primary=self._repository.get(name, version))
        plan = rollout.plan
        # A request without a key cannot be recognized, so chance decides. With one hash all of them would go to one version.
        key = key or format(random.getrandbits(64), "x")
        primary = self._available(plan, plan.version_of(key))
        if not plan.shadows:
            return ReplicaRoute(primary=primary)
        shadows = [self._shadow(name, shadow) for shadow in plan.shadows_of(key) if shadow != primary.version]
        return ReplicaRoute(primary=primary, shadows=tuple(shadow for shadow in shadows if shadow is not None))

    def key_column(self, name: str) -> str | None:
        """Return the column whose first value is the key of a request. None: the request's own key."""
        rollout = self._state.models.get(name)
        return None if rollout is None else rollout.plan.split_by

    def plans(self, name: str) -> bool:
        """Whether the model has a plan. Newer versions of one without are served as soon as they are exported."""
        return name in self._state.models

    def current_plans(self) -> dict[str, RolloutPlan]:
        """Return the plans in force by model."""
        return {name: rollout.plan for name, rollout in self._state.models.items()}

    def swap(self, replica: Replica) -> bool:
        """Let a newer version replace all others of a model without a plan. Returns False, and closes it, if there is a plan."""
        with self._changes:
            if not self.plans(replica.name):
                self._repository.replace(replica)
                return True
        replica.close()
        return False

    def _available(self, plan: RolloutPlan, version: int) -> Replica:
        for wanted in (version, plan.stable):
            try:
                return self._repository.get(plan.model, wanted)
            except ModelNotFoundError as error:
                self._served.count("missing_versions", plan.model, wanted)
                self._warnings.warn("a request is answered by another version than planned: %s", error)
        return self._repository.get(plan.model)

    def _shadow(self, name: str, version: int) -> Replica | None:
        try:
            return self._repository.get(name, version)
        except ModelNotFoundError as error:
            self._served.count("missing_versions", name, version)
            self._warnings.warn("a shadow does not predict: %s", error)
            return None

    # --- Observer ----------------------------------------------------------------------------------------------------

    def answered(self, answered: Answered) -> None:
        """Remember the predictions of an answer until its labels come."""
        self._served.answered(answered)

    # --- Labels ------------------------------------------------------------------------------------------------------

    def add_labels(self, labels: Iterable[ServedLabel]) -> dict[str, int]:
        """Join labels with served predictions, judge the candidates by them, and roll back one that breaks a bound.

        Returns:
            The number of labels that were joined, and of those that were repeated, late, unknown or invalid, see
            `PredictionMemory.join`.
        """
        counts, touched = self._served.add(labels)
        for model in touched:
            self._judge(model)
        if not self._saved:
            self._save_if_needed()
        return counts

    def _judge(self, model: str) -> None:
        rollout = self._state.models.get(model)
        if rollout is None:
            return
        plan = rollout.plan
        if plan.candidate is None and (plan.rewind is None or model not in self.targets):
            return
        broken = self._board.verdict(
            plan, self._clock(), version=plan.stable if plan.candidate is None else plan.candidate
        )
        if broken is None:
            return
        if plan.candidate is None:
            self._rewind_automatically(plan, broken)
        else:
            self._roll_back_automatically(plan, plan.candidate, broken)

    def _roll_back_automatically(self, plan: RolloutPlan, candidate: int, broken: str) -> None:
        with self._changes:
            rollout = self._state.models[plan.model]
            if rollout.plan is not plan:  # an operator was quicker
                return
            _log.warning(
                "model %r: version %d is rolled back, version %d answers all requests: %s",
                plan.model,
                candidate,
                plan.stable,
                broken,
            )
            self._served.count("rollbacks", plan.model, candidate)
            self._back_to_stable(rollout, candidate, broken, automatic=True)
            self._save_if_needed()

    def _rewind_automatically(self, plan: RolloutPlan, broken: str) -> None:
        assert plan.rewind is not None
        _log.warning("model %r: goes back to %s: %s", plan.model, plan.rewind, broken)
        # Whether or not it succeeds, the next verdict needs new answers.
        self._board.restart(plan, self._clock())
        try:
            self._rewind(plan.model, plan.rewind, broken, automatic=True)
        except MonolithError as error:
            self._served.count("failed_rewinds", plan.model, plan.stable)
            _log.error("model %r: could not go back to %s: %s", plan.model, plan.rewind, error)

    # --- Operator ----------------------------------------------------------------------------------------------------

    def set_plan(self, plan: RolloutPlan, *, again: bool = False) -> None:
        """Put a plan into force. It is durable when this returns.

        Args:
            plan: Replaces the one of the same model.
            again: Allow a candidate that was rolled back before.

        Raises:
            ModelNotFoundError: The server does not have one of the versions.
            InvalidArgumentError: The candidate was rolled back before, or the plan needs what the model does not have.
            StorageError: The plan cannot be made durable. The one before stays in force.
        """
        if plan.rewind is not None:
            self._target(plan.model)
        self._refuse_rejected(plan, again=again)
        self._load(plan.model, plan.versions)
        with self._changes:
            self._refuse_rejected(plan, again=again)
            for version in plan.versions:  # another plan may have removed one
                self._repository.get(plan.model, version)
            before = self._state.models.get(plan.model)
            rejected = () if before is None else before.rejected
            kept = before or ModelRollout(plan=plan, started=0.0)
            rejected = tuple(version for version in rejected if version not in plan.versions)
            change = kept.model_copy(update={"plan": plan, "rejected": rejected})
            event = self._event("plan", plan.candidate or plan.stable, plan.describe())
            self._put(change, event)

    def _refuse_rejected(self, plan: RolloutPlan, *, again: bool) -> None:
        before = self._state.models.get(plan.model)
        if before is not None and plan.candidate in before.rejected and not again:
            raise InvalidArgumentError(
                f"candidate: version {plan.candidate} of {plan.model!r} was rolled back before; fix the model and export a new "
                "version, or say that it is to be tried again (--again, or ?again=true)"
            )

    def promote(self, model: str) -> RolloutPlan:
        """Make the candidate the stable version. It is durable when this returns."""
        with self._changes:
            rollout = self._rollout(model)
            plan = rollout.plan
            if plan.candidate is None:
                raise InvalidArgumentError(f"model {model!r}: there is no candidate to promote; set a plan with one")
            self._repository.get(model, plan.candidate)
            shadows = tuple(version for version in plan.shadows if version != plan.candidate)
            promoted = plan.replaced(stable=plan.candidate, candidate=None, share=0.0, shadows=shadows)
            change = rollout.model_copy(update={"plan": promoted, "previous": plan.stable})
            self._put(change, self._event("promote", plan.candidate, f"stable was {plan.stable}"))
            return promoted

    def rollback(self, model: str, *, to: str | None = None, reason: str = "asked by an operator") -> str:
        """Go back at once: to the stable version, without a candidate to the one before the last promotion, or to a moment.

        Args:
            model: Name of the model.
            to: A moment such as "10m-ago", for a replica that follows a run. See `moment_of`.
            reason: For the record.

        Returns:
            A sentence that says what was done.

        Raises:
            InvalidArgumentError: There is nothing to go back to.
            StorageError: Traffic has gone back, but this cannot be made durable. It is tried again with every label.
        """
        if to is not None:
            return self._rewind(model, to, reason, automatic=False)
        with self._changes:
            rollout = self._rollout(model)
            plan = rollout.plan
            if plan.candidate is not None:
                self._back_to_stable(rollout, plan.candidate, reason, automatic=False)
            elif rollout.previous is not None:
                self._repository.get(model, rollout.previous)
                back = plan.replaced(stable=rollout.previous, shadows=())
                change = rollout.model_copy(
                    update={"plan": back, "previous": None, "rejected": _with(rollout.rejected, plan.stable)}
                )
                self._apply(change, self._event("rollback", plan.stable, reason))
            else:
                raise InvalidArgumentError(
                    f"model {model!r}: version {plan.stable} answers all requests, and nothing was promoted before it; set a "
                    "plan with another stable version, or name a moment to go back to"
                )
            self._save()
            stable = self._state.models[model].plan.stable
        done = f"model {model!r}: version {stable} answers all requests"
        _log.warning("%s: %s", done, reason)
        return done

    def status(self) -> dict[str, Any]:
        """Return plans, events, quality and counts of all models, as JSON can express them."""
        quality = self._board.as_json(self._clock())
        models: dict[str, object] = {}
        for name, rollout in self._state.models.items():
            models[name] = {
                **rollout.model_dump(mode="json"),
                "available": list(self._versions(name)),
                "answers": self._served.answers(name),
                "quality": quality.get(name, {}),
            }
        return {
            "models": models,
            "served": list(self._repository.names()),
            "labels": dict(self.memory.counts),
            "remembered": len(self.memory),
            "saved": self._saved,
        }

    def quality(self) -> dict[str, dict[int, dict[str, object]]]:
        """Return numbers by model and version for a table, see `QualityBoard.table`. `status` has all numbers."""
        return self._board.table(self._clock())

    def rollback_possible(self, model: str | None = None) -> tuple[bool, str]:
        """Return whether `rollback` could go back for a model, by default the first one, and to what, or why not."""
        name = model or next(iter(self._repository.names()), "")
        rollout = self._state.models.get(name)
        possible, reason = (False, f"model {name!r} has no rollout") if rollout is None else rollout.way_back()
        if not possible and self._found_target(name) is not None:
            return True, f"{reason}; name a moment of the run that it follows, such as 10m-ago"
        return possible, reason

    def counters(self) -> dict[tuple[str, str, str], int]:
        """Return all counts by (what, model, version), see `ServedQuality.counters`."""
        return self._served.counters()

    def close(self) -> None:
        """Let another server use the folder. Calling it twice is harmless."""
        self._file.close()

    # --- Changes -----------------------------------------------------------------------------------------------------

    def _back_to_stable(self, rollout: ModelRollout, candidate: int, reason: str, *, automatic: bool) -> None:
        plan = rollout.plan.replaced(candidate=None, share=0.0)
        change = rollout.model_copy(update={"plan": plan, "rejected": _with(rollout.rejected, candidate)})
        self._apply(change, self._event("rollback", candidate, reason, automatic=automatic))

    def _rewind(self, model: str, to: str, reason: str, *, automatic: bool) -> str:
        moment = moment_of(to, now=self._now())
        done = self._target(model).rollback_to(moment)
        _log.warning("model %r: went back to %s: %s", model, moment, done)
        self._served.count("rewinds", model)
        with self._changes:
            rollout = self._state.models.get(model)
            if rollout is not None:
                event = self._event("rewind", rollout.plan.stable, f"{moment}: {done}: {reason}", automatic=automatic)
                self._apply(rollout.model_copy(), event)
                self._save_if_needed()
        return done

    def _target(self, model: str) -> RollbackTarget:
        target = self._found_target(model)
        if target is None:
            raise InvalidArgumentError(
                f"model {model!r}: does not follow a run, so it cannot go back to a moment; roll back to another version"
            )
        return target

    def _found_target(self, model: str) -> RollbackTarget | None:
        """Return what goes back to a moment: what was given, or what the replica of the model follows its run with."""
        if model in self.targets or not self._repository.ready(model):
            return self.targets.get(model)
        follower = self._repository.get(model).follower
        return follower if isinstance(follower, RollbackTarget) else None

    def _rollout(self, model: str) -> ModelRollout:
        rollout = self._state.models.get(model)
        if rollout is None:
            known = ", ".join(map(repr, self._state.models)) or "none"
            raise InvalidArgumentError(f"model {model!r}: has no plan; models with one: {known}")
        return rollout

    def _event(self, kind: str, version: int, reason: str, *, automatic: bool = False) -> RolloutEvent:
        return RolloutEvent(time=self._now(), kind=kind, version=version, reason=reason, automatic=automatic)  # type: ignore[arg-type]

    def _put(self, change: ModelRollout, event: RolloutEvent) -> None:
        """Make a change durable and then put it into force."""
        before = self._state
        change = change.recorded(event)
        after = RolloutState(models={**before.models, change.plan.model: change})
        self._file.write(after)
        self._saved = True
        self._enforce(after, change)

    def _apply(self, change: ModelRollout, event: RolloutEvent) -> None:
        """Put a change into force at once. It is to be saved by the caller."""
        change = change.recorded(event)
        self._saved = False
        self._enforce(RolloutState(models={**self._state.models, change.plan.model: change}), change)

    def _enforce(self, state: RolloutState, change: ModelRollout) -> None:
        self._state = state  # one assignment, which requests see whole
        self._board.restart(change.plan, self._clock())
        self._follow_default(change.plan)
        if self._open_version is not None:
            for version in set(self._versions(change.plan.model)) - set(change.loaded):
                self._repository.remove(change.plan.model, version)

    def _load(self, model: str, versions: Iterable[int]) -> None:
        """Make sure that versions are served, or raise `ModelNotFoundError`. It takes as long as an export takes to load."""
        added: list[int] = []
        with self._loading:
            try:
                for version in versions:
                    if self._open_version is None or self._repository.ready(model, version):
                        self._repository.get(model, version)
                    else:
                        self._repository.add(self._open_version(model, version), default=False)
                        added.append(version)
            except BaseException:
                for version in added:
                    self._repository.remove(model, version)
                raise

    def _save(self) -> None:
        with self._changes:
            self._file.write(self._state)
            self._saved = True

    def _save_if_needed(self) -> None:
        try:
            self._save()
        except StorageError as error:
            self._warnings.warn("the rollout is not durable yet: %s", error)

    def _follow_default(self, plan: RolloutPlan) -> None:
        """Let whoever asks the repository for the default version get the stable one."""
        if plan.stable in self._versions(plan.model):
            self._repository.set_default(plan.model, plan.stable)
        else:
            _log.warning("model %r: version %d of its rollout is not loaded", plan.model, plan.stable)

    def _versions(self, model: str) -> tuple[int, ...]:
        return self._repository.versions(model) if self._repository.ready(model) else ()


def _with(versions: tuple[int, ...], version: int) -> tuple[int, ...]:
    return (*(other for other in versions if other != version), version)
