"""`PartsJob`: the parts of an online loop as roles of one job: joiner, trainer, replica, and whatever else belongs to it."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from monolith.cluster.launch.roles import Role, RoleKind
from monolith.cluster.liveness import Liveness
from monolith.config import Config
from monolith.errors import ConfigError

__all__ = ["LoopPart", "PartsJob", "PrepareStep"]

Command = Annotated[str, Field(min_length=1, max_length=10_000)]


def _python_args(command: str) -> list[str]:
    """Return the arguments of Python for a command: `monolith VERB ...` or `python SCRIPT ...`."""
    try:
        first, *rest = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"expected a command as a shell takes it, {error}; got {command!r}") from None
    if first == "monolith" and rest:
        return ["-m", "monolith.cli", *rest]
    if first == "python" and rest:
        return rest
    raise ValueError(f"expected 'monolith VERB ...' or 'python SCRIPT ...', got {command!r}")


class PrepareStep(Config):
    """A command that runs before the parts, one after the other, unless what it makes is there."""

    run: Command
    """The command: `monolith VERB ...` or `python SCRIPT ...`, with ${NAME} for a variable."""
    unless: str | None = None
    """A file or folder. If it exists, the command is left out."""

    @field_validator("run")
    @classmethod
    def _is_command(cls, run: str) -> str:
        _python_args(run)
        return run


class LoopPart(Config):
    """One part of an online loop: a command that runs until it is asked to end, in one process or several."""

    run: Command
    """The command: `monolith VERB ...` or `python SCRIPT ...`. ${NAME} stands for a variable, `{index}` and `{count}` for the
    number of the process and how many there are of the part."""
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    """Processes of this part."""
    ends: bool = False
    """Whether the whole job ends when this part has succeeded. Otherwise a part that ends has failed, and is restarted."""
    wait_for: str | None = None
    """A file or folder that must exist before the part is started."""
    env: dict[str, str] = {}
    """Variables of its environment."""

    @field_validator("run")
    @classmethod
    def _is_command(cls, run: str) -> str:
        _python_args(run)
        return run


class PartsJob(Config):
    """An online loop: the steps that prepare it, and the parts that then run together.

    In YAML, where paths are relative to the working directory:

        name: clicks
        folder: runs/live                     # logs
        prepare:
          - run: monolith train job.yaml      # history
            unless: runs/live/clicks
        parts:
          joiner: {run: "monolith join join.yaml --index {index} --count {count}", count: 2}
          trainer: {run: monolith train job.yaml --then stream:runs/live/examples}
          replica: {run: monolith serve --run runs/live/clicks}

    Example:
        >>> job = PartsJob(name="clicks", uuid="clicks-7", parts={"joiner": LoopPart(run="monolith join join.yaml", count=2)})
        >>> [str(role) for role in job.roles], job.python_args(job.roles[1])
        (['joiner 0', 'joiner 1'], ['-m', 'monolith.cli', 'join', 'join.yaml'])
    """

    config_group: ClassVar[str] = "parts"

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,60}$")]
    """Name of the loop, for messages."""
    folder: str | None = None
    """Folder of the loop. The logs of the parts are in its folder `logs`."""
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = {}
    """Variables that commands may use, as ${NAME}, and that all processes have. The environment of the launcher goes first."""
    prepare: tuple[PrepareStep, ...] = ()
    """Commands that run first, one after the other."""
    parts: Annotated[dict[str, LoopPart], Field(min_length=1)]
    """The parts by name, in the order in which they are started."""
    uuid: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")] = "loop"
    """Name of this launch."""
    liveness: Liveness = Liveness(restarts=3)
    """When a part counts as hung, and how often it is restarted."""

    @model_validator(mode="after")
    def _names_are_clear(self) -> Self:
        for name in self.parts:
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}", name) is None:
                raise ValueError(f"parts: expected names of letters, digits, - and _, got {name!r}")
        return self

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], **fields: Any) -> Self:  # noqa: ANN401 - pydantic checks each field's own type
        """Build from what a YAML file has, and further fields."""
        parts = tree.get("parts")
        # Checked on their own first, so that an error names the part and suggests keys of the same level.
        for name, part in (parts or {}).items() if isinstance(parts, dict) else ():
            try:
                LoopPart.from_json(json.dumps(part))
            except ConfigError as error:
                raise ConfigError(f"parts.{name}: {error}") from None
        job = cls.from_json(json.dumps(dict(tree)))
        return job.model_copy(update=fields)

    @property
    def model_dir(self) -> str | None:
        """The folder of the loop, for messages."""
        return self.folder

    @property
    def roles(self) -> tuple[Role, ...]:
        """All processes, part by part."""
        return tuple(
            Role(RoleKind.DRIVER if part.ends else RoleKind.PART, index, name=name, single=part.count == 1)
            for name, part in self.parts.items()
            for index in range(part.count)
        )

    @property
    def shape(self) -> dict[str, int]:
        """The number of processes by part, for messages."""
        return {name: part.count for name, part in self.parts.items()}

    def is_due(self, role: Role) -> bool:
        """Return whether what the part waits for exists."""
        awaited = self.parts[role.name].wait_for
        return awaited is None or Path(self._expanded(awaited)).exists()

    def python_args(self, role: Role) -> list[str]:
        """Return the arguments of Python for `role`."""
        part = self.parts[role.name]
        numbers = {"{index}": str(role.index), "{count}": str(part.count)}
        return [_replaced(self._expanded(word), numbers) for word in _python_args(part.run)]

    def prepare_args(self, step: PrepareStep) -> list[str] | None:
        """Return the arguments of Python for a step. None if it has nothing to do."""
        if step.unless is not None and Path(self._expanded(step.unless)).exists():
            return None
        return [self._expanded(word) for word in _python_args(step.run)]

    def environment(self, role: Role, discovery: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables of `role`. Parts find each other by what their commands say, not by `discovery`."""
        return {**self.variables, **self.parts[role.name].env}

    @property
    def variables(self) -> dict[str, str]:
        """`env` with the values that the environment of the launcher has."""
        return {name: os.environ.get(name, text) for name, text in self.env.items()}

    def _expanded(self, text: str) -> str:
        try:
            return Template(text).substitute({**os.environ, **self.variables})
        except KeyError as error:
            raise ConfigError(
                f"{text!r}: there is no variable {error.args[0]}; give it a default in `env`, or set it"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{text!r}: {error}; write $$ for a dollar sign") from None


def _replaced(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
