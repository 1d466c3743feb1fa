"""Danger: a rank is killed at any moment, and the job does not come back, trains a batch twice or never, or ends with other bits.

A job of ranks under `monolith launch` in reproducible mode. A campaign kills ranks with SIGKILL at random moments. Afterwards
what is in the last checkpoint is compared with the data, and bit by bit with a run of one process that nobody has disturbed. The
long form makes 60 kills, or MONOLITH_CAMPAIGN_KILLS.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
from rank_campaign import RankCampaign, quiet, verdict


@pytest.mark.parametrize(
    ("ranks", "kills", "seed"),
    [
        pytest.param(2, 4, 1, id="quick"),
        pytest.param(4, int(os.environ.get("MONOLITH_CAMPAIGN_KILLS", "60")), 2, id="long", marks=pytest.mark.slow),
    ],
)
def test_every_batch_counts_once_and_bits_are_those_of_a_quiet_run(
    tmp_path: Path, ranks: int, kills: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with RankCampaign(tmp_path, ranks, seed=seed) as job:
        job.until_trained(since=0.0)
        for number in range(kills):
            time.sleep(job.chance.uniform(0.0, 1.5))
            # Each rank is hit at least once.
            job.hit(number if number < ranks else job.chance.randrange(ranks))
        batches = job.finish()
    found = verdict(tmp_path, batches)
    with capsys.disabled():
        print(  # noqa: T201 - for docs/guarantees.md
            f"\n{kills} kills of {ranks} ranks: lost {found.lost}, doubled {found.doubled}, same bits: {found.same_bits}; "
            f"training again after median {statistics.median(job.recoveries):.1f} s, worst {max(job.recoveries):.1f} s"
        )
    assert found == quiet(batches)
