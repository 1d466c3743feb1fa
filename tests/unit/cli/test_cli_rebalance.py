"""Danger: a command that moves the rows of running servers reports success without having moved them, or fails silently."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from monolith.cli import main
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.table import Bags
from monolith.testing import sgd_table_config
from moving_buckets import MuteLink, filled, moved, mover_done

TOKEN = "correct-horse-battery"


def test_rebalance_moves_shares_and_tells_who_owns_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOLITH_PS_TOKEN", TOKEN)
    config = ServerConfig(token=TOKEN)
    with ParameterServer(config) as one, ParameterServer(config) as two, ParameterServer(config) as three:
        known = ClientConfig(token=TOKEN)
        with ServerStore([one.address, two.address], [sgd_table_config(1, name="t")], config=known) as store:
            store.assign("t", np.arange(500), torch.ones(500, 1))
            before, after = f"{one.address},{two.address}", f"{one.address}, {two.address}, {three.address}"
            assert main(["rebalance", "--from", before, "--to", after, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
            assert sorted(server["buckets"] for server in told.values()) == [1365, 1365, 1366]
            assert set(told) == {one.address, two.address, three.address}
            (rows,) = store.lookup([Bags(table="t", ids=np.arange(500), offsets=np.arange(501))])
            assert rows.eq(1.0).all()
            assert main(["rebalance", "--from", after, "--to", before]) == 0
            assert "2,048" in capsys.readouterr().out


def test_what_cannot_be_done_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with ParameterServer() as one:
        command = ["rebalance", "--from", one.address, "--timeout", "0.5", "--to"]
        assert main([*command, "127.0.0.1:9"]) == 1
        assert "no server at 127.0.0.1:9" in capsys.readouterr().err
        assert main([*command, "nowhere"]) == 2
        assert main([*command, ""]) == 2
        # Not even if nobody answers: a word that is no address is not worth waiting for.
        assert main(["rebalance", "--from", "127.0.0.1:9", "--timeout", "600", "--to", "nowhere"]) == 2
        assert "expected host:port, got 'nowhere'" in capsys.readouterr().err


def test_a_piece_that_is_stuck_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    with ParameterServer() as giver, ParameterServer() as taker, filled(giver):
        giver._dispatcher._moves._delivery._connect = lambda address: MuteLink(address, timeout=1)
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        mover_done(giver.address)
        command = ["rebalance", "--from", giver.address, "--take-back"]
        assert main([*command, "--lost", "127.0.0.1:9"]) == 2
        assert "nothing is in transit to 127.0.0.1:9" in capsys.readouterr().err
        assert main([*command, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["settled"] == 1
        assert told[giver.address] == {
            "buckets": [0, 2048],
            "dense": [],
            "destination": taker.address,
            "owner": giver.address,
        }


@pytest.mark.parametrize("options", [[], ["--to", "a:1", "--take-back"], ["--to", "a:1", "--lost", "b:1"]])
def test_either_moves_or_takes_back(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rebalance", "--from", "a:1", *options]) == 2
    assert "either --to, or --take-back" in capsys.readouterr().err
