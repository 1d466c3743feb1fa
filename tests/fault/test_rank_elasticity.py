"""Danger: a job ends although enough ranks are left, never takes a rank in again, or mixes up data and rows when it does.

The job, and how what it has trained is counted, are those of test_rank_campaign.py.
"""

from __future__ import annotations

from pathlib import Path

from rank_campaign import RankCampaign, quiet, verdict

from real_servers import until


def test_a_job_goes_on_without_a_rank_and_takes_it_in_when_it_comes_back(tmp_path: Path) -> None:
    """After hang, backoff, start-up and a heartbeat, about six seconds, rank 0 does not wait any longer."""
    options = ("--min-ranks", "1")
    with RankCampaign(tmp_path, 2, launch_options=options, liveness={"startup_secs": 0.5, "hang_secs": 4.0}) as job:
        job.until_trained(since=0.0)
        (tmp_path / "late-1").touch()
        process = job.process(1)
        signal_at = job.last_step(0)[1]
        job.kill(process)
        until(lambda: "continuing from step" in job.said(0) and "with 1 rank," in job.said(0), seconds=60)
        job.until_trained(0, since=signal_at)
        alone = job.last_step(0)[0]
        (tmp_path / "late-1").unlink()
        job.until_trained(1, since=job.last_step(0)[1])
        assert job.last_step(1)[0] > alone, "rank 1 continues where the others are"
        batches = job.finish()
        assert "another rank joins the run: 1" in job.said(0)
    assert verdict(tmp_path, batches) == quiet(batches)
