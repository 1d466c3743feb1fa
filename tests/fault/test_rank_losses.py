"""Danger: ranks wait for ever for one that hangs, or a job that cannot go on is restarted for ever.

The job, and how what it has trained is counted, are those of test_rank_campaign.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

from rank_campaign import RankCampaign, quiet, verdict


def test_a_rank_that_hangs_is_noticed_named_and_replaced(tmp_path: Path) -> None:
    with RankCampaign(tmp_path, 2) as job:
        job.until_trained(since=0.0)
        process = job.process(1)
        job.hit(1, signal.SIGSTOP)
        batches = job.finish()
        # Rank 0 has noticed it by itself, before the launcher did: its deadline is shorter.
        assert f"rank 1, process {process} of " in job.said(0)
        assert "was lost in step" in job.said(0)
        assert "continuing from step" in job.said(0)
    assert verdict(tmp_path, batches) == quiet(batches)


def test_an_error_that_repeats_in_the_same_step_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "raise-1").write_text("7")
    with RankCampaign(tmp_path, 2) as job:
        code, errors = job.launch.end(120)
        assert code == 1
        assert "rank 1 failed: exit code 2" in errors
        assert "this rank has failed in step 7 with the same error as the time before" in errors
        assert "ValueError: as the campaign wants it" in errors
        assert len(job.launch.pids("rank 1")) == 2, "it is tried once more, and not for ever"
        assert "rank 1, process" in job.said(0)
        assert "failed in step 6: ValueError: as the campaign wants it" in job.said(0), "the others are told why"
