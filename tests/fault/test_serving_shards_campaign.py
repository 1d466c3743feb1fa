"""Danger: a shard or a front end that is killed or stopped while it follows a run comes back with rows or weights of another
moment, or fails requests that others could answer, or the answers stay a mix of two states when the run has ended.

`MONOLITH_CAMPAIGN_FAULTS=50 pytest -m slow tests/fault/test_serving_shards_campaign.py` is a longer form."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from test_follow_campaign import Processes, require_equal

from followed_tables import until
from serving_shards import ShardProcess

SLOW_FAULTS = int(os.environ.get("MONOLITH_CAMPAIGN_FAULTS", "20"))
_log = logging.getLogger(__name__)


class ShardedProcesses(Processes):
    """A trainer, a front end, and two replicas of each of two shards, all of which follow the run."""

    def __init__(self, folder: Path) -> None:
        self.shards: list[ShardProcess] = []
        try:
            super().__init__(folder, batches=10**6)
        except BaseException:
            self._end_shards()
            raise

    def _serve_command(self) -> list[str]:
        while len(self.shards) < 4:
            self.shards.append(self._shard(len(self.shards) % 2))
        addresses = [",".join(shard.address for shard in self.shards[number::2]) for number in range(2)]
        return [*super()._serve_command(), "--shards", ";".join(addresses), "--shard-timeout", "30"]

    def _shard(self, number: int, port: int = 0) -> ShardProcess:
        return ShardProcess(self.export, number, 2, port=port, options=("--run", str(self.run)))

    def hurt_shard(self, draw: random.Random) -> str:
        """Kill a shard and start it again, or stop it. Another replica of it answers."""
        number, refused, answered = draw.randrange(4), self.refused, self.answered
        shard = self.shards[number]
        if draw.random() < 0.5:
            shard.signal(signal.SIGSTOP)
            time.sleep(draw.choice((0.1, 0.5, 6.0)))
            shard.signal(signal.SIGCONT)
            return "shard stopped"
        shard.kill()
        until(lambda: self.answered > answered + 3, "answers of the other replica")
        self.shards[number] = self._shard(number % 2, shard.port)
        assert self.refused == refused, "the other replica of the shard must answer"
        return "shard killed"

    def close(self) -> None:
        super().close()
        self._end_shards()

    def _end_shards(self) -> None:
        for shard in self.shards:
            shard.kill()


@pytest.mark.slow
def test_answers_are_those_of_the_trained_model_in_the_end(tmp_path: Path) -> None:
    draw, history = random.Random(5), Counter[str]()
    processes = ShardedProcesses(tmp_path)
    try:
        until(lambda: processes.step() > 0, "the run to be followed")
        for _ in range(SLOW_FAULTS):
            time.sleep(draw.uniform(0.1, 1.5))
            history[processes.hurt_shard(draw) if draw.random() < 0.6 else processes.hurt(draw)] += 1
        # One shard is away while the run ends, the other replica of it is not.
        processes.shards[1].kill()
        processes.end_run()
        processes.trainer.wait(timeout=600)
        processes.shards[1] = processes._shard(1, processes.shards[1].port)
        # Only the one that has come back answers for the shard.
        processes.shards[3].kill()
        require_equal(processes, history)
    finally:
        processes.close()
    _log.info("%s", ", ".join(f"{count} {what}" for what, count in sorted(history.items())))
