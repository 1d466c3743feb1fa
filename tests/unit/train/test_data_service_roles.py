"""Danger: a process of the data service runs the training script: it trains, evaluates, or exports as if it were the chief."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from monolith.errors import ConfigError
from monolith.features import Batch
from monolith.original import HandOver, mlp_scheduler
from monolith.train import Estimator, RunConfig, RunnerConfig
from training import ClickModel, batch_of

DISPATCHER = {"MLP_ROLE": "dispatcher", "MLP_DISPATCHER_NUM": "1", "MLP_WORKER_NUM": "1"}


class Model(ClickModel):
    def input_fn(self, mode: str) -> Iterable[Batch]:
        pytest.fail("it reads data")


def dispatcher(folder: Path, **more: str) -> Estimator:
    return Estimator(Model(), RunConfig(model_dir=str(folder)), runner=RunnerConfig.from_env({**DISPATCHER, **more}))


METHODS: list[Callable[[Estimator], object]] = [
    lambda estimator: estimator.train(),
    lambda estimator: estimator.evaluate(),
    lambda estimator: list(estimator.predict()),
    lambda estimator: estimator.export_saved_model(example=batch_of(0)),
    lambda estimator: estimator.global_step,
]


@pytest.mark.parametrize("more", [{}, {"MONOLITH_IS_LOCAL": "true"}, {"MLP_PS_NUM": "1"}])
@pytest.mark.parametrize("method", METHODS, ids=["train", "evaluate", "predict", "export", "global_step"])
def test_whatever_the_script_does_first_it_serves_and_ends(
    method: Callable[[Estimator], object], more: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []

    def mlp_pass(*given: object, **more: object) -> HandOver:
        served.append("served")
        return HandOver(role="DISPATCHER", finished=True)

    monkeypatch.setattr(mlp_scheduler, "mlp_pass", mlp_pass)
    for name, value in DISPATCHER.items():
        monkeypatch.setenv(name, value)
    estimator = dispatcher(tmp_path, **more)
    with pytest.raises(SystemExit) as ended:
        method(estimator)
    assert (ended.value.code, served, list(tmp_path.iterdir())) == (0, ["served"], [])
    assert not estimator.runner.is_chief


def test_a_role_that_no_scheduler_gave_is_refused() -> None:
    with pytest.raises(ConfigError, match="it did not give it to this process; elsewhere run `monolith dispatcher`"):
        Estimator(Model(), runner=RunnerConfig(server_type="dispatcher")).train()
