"""Danger: an operator who cannot roll back because the command refuses, does something else, or shows another state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli import main
from monolith.serve.rollout.router import RolloutRouter
from monolith.serve.server.routing import Answered
from rollout_models import MODEL, clicks
from rollout_server import TOKEN, serve


class Operator:
    """Runs commands against a server."""

    def __init__(self, address: str, router: RolloutRouter, capsys: pytest.CaptureFixture[str]) -> None:
        self.address, self.router, self._capsys = address, router, capsys

    def run(self, verb: str, *options: str) -> tuple[int, str, str]:
        code = main(["rollout", verb, f"http://{self.address}", *options])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def asks(self, verb: str, *options: str) -> dict[str, Any]:
        code, out, err = self.run(verb, *options, "--json")
        assert code == 0, err
        answer: dict[str, Any] = json.loads(out)
        return answer


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Operator]:
    monkeypatch.setenv("MONOLITH_PS_TOKEN", TOKEN)
    server, router = serve(tmp_path / "state")
    with server:
        yield Operator(server.http_address, router, capsys)
    router.close()


def answer(router: RolloutRouter, request_id: str, p: list[float]) -> None:
    replica = router.route(MODEL, None, request_id).primary
    router.answered(
        Answered(
            model=MODEL,
            version=replica.version,
            protocol="python",
            rows=len(p),
            seconds=0.0,
            status="ok",
            request_id=request_id,
            outputs=replica.predict({"p": torch.tensor(p)}),
        )
    )


def test_a_split_a_promotion_and_its_rollback(operator: Operator) -> None:
    set_plan = operator.asks("set", "--model", MODEL, "--stable", "7", "--candidate", "9", "--share", "0.25")
    assert set_plan["plan"]["share"] == 0.25
    assert operator.asks("show")["models"][MODEL]["plan"]["candidate"] == 9
    assert operator.asks("set", "--share", "0.5")["plan"]["candidate"] == 9, "what is not given stays"
    assert operator.asks("promote")["plan"]["stable"] == 9
    assert operator.asks("rollback", "--reason", "drill") == {
        "model": MODEL,
        "message": "model 'clicks': version 7 answers all requests",
    }
    assert [event["kind"] for event in operator.asks("show")["models"][MODEL]["events"]] == [
        "plan",
        "plan",
        "promote",
        "rollback",
    ]


def test_a_plan_file_with_bounds(operator: Operator, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(f"model: {MODEL}\nstable: 7\nshadows: [8, 9]\nbounds: {{max_calibration_error: 0.1}}\n")
    plan = operator.asks("set", "--plan", str(file), "--min-labels", "500")["plan"]
    assert plan["shadows"] == [8, 9]
    assert (plan["bounds"]["max_calibration_error"], plan["bounds"]["min_labels"]) == (0.1, 500)


def test_labels_of_a_file_roll_a_poisoned_candidate_back(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    operator.run("set", "--model", MODEL, "--stable", "7", "--candidate", "8", "--share", "0.5", "--min-labels", "300")
    p, labels = clicks(6000)
    for number, value in enumerate(p):
        answer(operator.router, str(number), [value])
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(f'{{"request_id": "{number}", "label": {label}}}\n' for number, label in enumerate(labels)))
    assert operator.asks("labels", str(file)) == {"joined": 6000, "repeated": 0, "late": 0, "unknown": 0, "invalid": 0}
    code, out, _ = operator.run("show")
    assert code == 0
    assert "automatic rollback 8: head 'click': calibration" in out
    assert "clicks.7.answers" in out
    code, _, err = operator.run("set", "--candidate", "8", "--share", "0.5")
    assert (code, "was rolled back before" in err) == (2, True)
    assert operator.asks("set", "--candidate", "8", "--share", "0.5", "--again")["plan"]["candidate"] == 8


def test_the_url_may_come_first(operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", operator.address, "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == {}


def test_a_wrong_token_is_refused(operator: Operator, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("another-token-of-tests")
    file.chmod(0o600)
    code, _, err = operator.run("show", "--token-file", str(file))
    assert code == 1
    assert "expected the token of this server" in err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("promote",), 2, "has no plan; models with one: none"),
        (("rollback", "--model", MODEL), 2, "has no plan"),
        (("rollback", "--model", MODEL, "--to", "10m"), 2, "a moment in the past ends in -ago"),
        (("set", "--model", MODEL, "--stable", "5"), 1, "has no version 5"),
        (("set", "--model", MODEL), 2, "RolloutPlan.stable: field required"),
        (("set", "--plan", "missing.yaml"), 4, "missing.yaml: cannot be read"),
    ],
)
def test_what_cannot_be_done_is_told(operator: Operator, options: tuple[str, ...], code: int, message: str) -> None:
    found, _, err = operator.run(*options)
    assert (found, message in err) == (code, True), err


def test_a_token_does_not_travel_unencrypted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONOLITH_PS_TOKEN", TOKEN)
    assert main(["rollout", "show", "http://models.example.com:8000"]) == 2
    assert "would send the token unencrypted" in capsys.readouterr().err
    assert main(["rollout", "show", "ftp://127.0.0.1"]) == 2


def test_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "show", "http://127.0.0.1:9"]) == 1
    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["show", "set", "promote", "rollback", "labels"])
def test_help_fits_80_columns(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["rollout", verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: monolith rollout {verb}")
    assert max(map(len, text.splitlines())) <= 80
