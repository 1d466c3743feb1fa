"""Danger: an online loop that goes on without one of its parts, ends although it should run, or starts a part too early."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from monolith.cluster.launch import LoopPart, PartsJob, PrepareStep, Role, RoleState, Supervisor
from monolith.cluster.liveness import Liveness
from monolith.errors import ConfigError
from monolith.testing.roles import ScriptedProcess


class Loop:
    """A loop of scripted processes, with a clock of its own."""

    def __init__(self, *, restarts: int = 0, **parts: LoopPart) -> None:
        self.job = PartsJob(name="loop", parts=parts, liveness=Liveness(restarts=restarts))
        self.now = 0.0
        self.running: dict[str, ScriptedProcess] = {}
        self.supervisor = Supervisor(
            self.job.roles, self._start, self.job.liveness, clock=lambda: self.now, is_due=self.job.is_due
        )
        assert not self.supervisor.step()

    def _start(self, role: Role) -> ScriptedProcess:
        self.running[str(role)] = ScriptedProcess()
        return self.running[str(role)]

    def exit(self, name: str, code: int) -> bool:
        self.running[name].exit(code)
        return self.supervisor.step()

    def state(self, name: str) -> RoleState:
        return next(status.state for status in self.supervisor.statuses if str(status.role) == name)


SERVE, JOIN, WORLD = (LoopPart(run=f"monolith {verb}") for verb in ("serve", "join", "stream"))


def test_a_part_that_ends_well_without_being_asked_has_failed() -> None:
    loop = Loop(joiner=JOIN, replica=SERVE)
    assert not loop.exit("joiner", 0)
    assert loop.state("joiner") is RoleState.FAILED
    assert loop.running["replica"].asked
    assert loop.exit("replica", 0)
    outcome = loop.supervisor.outcome
    assert not outcome.is_success
    assert str(outcome.failed) == "joiner"


def test_a_part_that_fails_is_restarted_and_the_others_go_on() -> None:
    loop = Loop(joiner=JOIN, replica=SERVE, restarts=1)
    loop.exit("joiner", 1)
    assert loop.state("joiner") is RoleState.WAITING
    assert not loop.running["replica"].asked
    loop.now += 60
    loop.supervisor.step()
    assert loop.state("joiner") is RoleState.RUNNING


def test_the_loop_ends_well_with_the_part_that_ends_it() -> None:
    loop = Loop(joiner=JOIN, world=LoopPart(run="python world.py", ends=True))
    assert not loop.exit("world", 0)
    assert loop.running["joiner"].asked
    assert loop.exit("joiner", 0)
    assert loop.supervisor.outcome.is_success


@pytest.mark.parametrize(("code", "succeeds"), [(130, True), (-15, True), (1, False)])
def test_a_part_that_ends_as_it_was_asked_has_not_failed(code: int, succeeds: bool) -> None:
    """A trainer that saves on SIGTERM and then exits with 130, as a shell expects it, has done its work."""
    loop = Loop(trainer=LoopPart(run="monolith train job.yaml"), world=LoopPart(run="python world.py", ends=True))
    loop.exit("world", 0)
    assert loop.exit("trainer", code)
    assert loop.supervisor.outcome.is_success == succeeds


def test_the_loop_fails_with_the_part_that_ends_it() -> None:
    loop = Loop(joiner=JOIN, world=LoopPart(run="python world.py", ends=True))
    loop.exit("world", 3)
    loop.exit("joiner", 0)
    assert str(loop.supervisor.outcome.failed) == "world"
    assert loop.supervisor.outcome.code == 3


def test_a_part_starts_when_what_it_waits_for_is_there(tmp_path: Path) -> None:
    export = tmp_path / "exported_models"
    loop = Loop(joiner=JOIN, replica=SERVE.model_copy(update={"wait_for": str(export)}))
    loop.supervisor.step()
    assert list(loop.running) == ["joiner"]
    export.mkdir()
    loop.supervisor.step()
    assert list(loop.running) == ["joiner", "replica"]


def test_a_stop_ends_parts_that_still_wait() -> None:
    loop = Loop(joiner=JOIN, replica=SERVE.model_copy(update={"wait_for": "/nothing/is/here"}))
    loop.supervisor.request_stop("received SIGINT")
    loop.supervisor.step()
    assert loop.exit("joiner", 0)
    assert loop.state("replica") is RoleState.ENDED


def test_each_process_of_a_part_has_its_number_in_its_command() -> None:
    part = LoopPart(run="monolith join 'my job.yaml' --index {index} --count {count}", count=2, env={"COLOUR": "blue"})
    job = PartsJob(name="loop", parts={"joiner": part})
    assert [str(role) for role in job.roles] == ["joiner 0", "joiner 1"]
    second = job.roles[1]
    assert job.python_args(second) == ["-m", "monolith.cli", "join", "my job.yaml", "--index", "1", "--count", "2"]
    assert job.environment(second) == {"COLOUR": "blue"}


def test_commands_use_variables_of_the_file_unless_the_environment_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "elsewhere")
    part = LoopPart(run="monolith serve --run ${FOLDER}/model --http-port $PORT")
    job = PartsJob(name="loop", env={"FOLDER": "runs", "PORT": "8000"}, parts={"replica": part})
    assert job.python_args(job.roles[0])[3:] == ["--run", "elsewhere/model", "--http-port", "8000"]
    assert job.environment(job.roles[0])["FOLDER"] == "elsewhere"


def test_a_variable_that_nobody_has_set_is_an_error() -> None:
    job = PartsJob(name="loop", parts={"replica": LoopPart(run="monolith serve ${NOBODY_HAS_SET_THIS}")})
    with pytest.raises(ConfigError, match="there is no variable NOBODY_HAS_SET_THIS; give it a default in `env`"):
        job.python_args(job.roles[0])


def test_a_step_is_left_out_when_what_it_makes_is_there(tmp_path: Path) -> None:
    step = PrepareStep(run="python make.py", unless=str(tmp_path / "made"))
    job = PartsJob(name="loop", prepare=(step,), parts={"joiner": JOIN})
    assert job.prepare_args(step) == ["make.py"]
    (tmp_path / "made").touch()
    assert job.prepare_args(step) is None


def test_the_loop_of_the_guide_can_be_read() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide-launch.md").read_text()
    tree = yaml.safe_load(guide.partition("```yaml loop.yaml\n")[2].partition("```")[0])
    assert list(PartsJob.from_tree(tree).shape) == ["joiner", "trainer", "replica", "world"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"name": "a", "parts": {}}, "PartsJob.parts"),
        ({"name": "a", "parts": {"j": {"run": "bash -c true"}}}, "parts.j: LoopPart.run: .*'monolith VERB"),
        ({"name": "a", "parts": {"j": {"run": "monolith 'x"}}}, "as a shell takes it"),
        (
            {"name": "a", "parts": {"j": {"run": "monolith x", "cuont": 2}}},
            "parts.j: LoopPart.cuont: .*did you mean 'count'",
        ),
        ({"name": "a", "parts": {"../j": {"run": "monolith x"}}}, "expected names of letters"),
        ({"name": "a/b", "parts": {"j": {"run": "monolith x"}}}, "PartsJob.name"),
        ({"name": "a", "parts": ["monolith x"]}, "PartsJob.parts"),
        (
            {"name": "a", "prepare": [{"run": "rm -r x"}], "parts": {"j": {"run": "monolith x"}}},
            "PrepareStep.*'monolith|prepare",
        ),
    ],
)
def test_a_wrong_file_names_the_part_and_what_was_expected(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PartsJob.from_tree(tree)
