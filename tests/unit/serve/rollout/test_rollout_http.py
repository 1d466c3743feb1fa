"""Danger: an operator's command or a label that anybody can send, or whose answer is believed although a crash undoes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rollout_server
from monolith.serve.rollout.routes import MAX_LABEL_BYTES
from rollout_models import MODEL, Asker, clicks
from rollout_server import TOKEN, serve


class Caller(Asker):
    """Also asks for predictions."""

    def __init__(self, address: str) -> None:
        super().__init__(address, TOKEN)
        self.asked = 0

    def infer(self, request_id: str, p: list[float], **more: object) -> int:
        """Ask for predictions and return the version that answered."""
        inputs = [{"name": "p", "datatype": "FP32", "shape": [len(p)], "data": p}]
        inputs += [
            {"name": name, "datatype": "INT64", "shape": [len(p)], "data": [value] * len(p)}
            for name, value in more.items()
        ]
        status, answer = self.send("POST", f"/v2/models/{MODEL}/infer", {"id": request_id, "inputs": inputs})
        assert status == 200, answer
        return int(answer["model_version"])

    def serve_and_label(self, count: int, rows: int = 10) -> list[int]:
        """Ask `count` requests, each followed by its labels. Returns the versions that answered."""
        versions = []
        for _ in range(count):
            self.asked += 1
            p, labels = clicks(rows, seed=self.asked)
            versions.append(self.infer(f"r-{self.asked}", p))
            status, counts = self.send("POST", "/labels", {"request_id": f"r-{self.asked}", "label": labels})
            assert (status, counts["joined"]) == (200, rows)
        return versions


@pytest.fixture
def asker(tmp_path: Path) -> Iterator[Caller]:
    server, router = serve(tmp_path)
    with server:
        yield Caller(server.http_address)
    router.close()


def plan(candidate: int, share: float = 0.5, **fields: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "stable": 7,
        "candidate": candidate,
        "share": share,
        "bounds": {"min_labels": 300},
        **fields,
    }


def test_a_poisoned_candidate_over_http(asker: Caller) -> None:
    assert asker.send("POST", "/rollout", plan(8))[0] == 200
    versions = asker.serve_and_label(150)
    assert 8 in versions[:60]
    assert set(versions[100:]) == {7}
    status, state = asker.send("GET", "/rollout")
    rollout = state["models"][MODEL]
    assert (status, rollout["plan"]["candidate"], rollout["rejected"]) == (200, None, [8])
    assert rollout["events"][-1]["reason"].startswith("head 'click': calibration")
    assert rollout["quality"]["7"]["heads"]["click"]["total"]["labels"] >= 1000
    assert state["labels"] == {"labels_joined": 1500}
    assert asker.send("POST", "/rollout", plan(8))[0] == 400
    assert asker.send("POST", "/rollout?again=true", plan(8))[0] == 200


def test_a_user_sees_one_version(asker: Caller) -> None:
    asker.send("POST", "/rollout", plan(9, split_by="user_id"))
    seen = {
        user: {asker.infer(f"{user}-{number}", [0.5, 0.6], user_id=user) for number in range(3)} for user in range(30)
    }
    assert all(len(versions) == 1 for versions in seen.values())
    assert {version for versions in seen.values() for version in versions} == {7, 9}


def test_promote_and_roll_back(asker: Caller) -> None:
    asker.send("POST", "/rollout", plan(9, share=0.0))
    assert asker.infer("a", [0.5]) == 7
    status, answer = asker.send("POST", "/rollout/promote", {"model": MODEL})
    assert (status, answer["plan"]["stable"]) == (200, 9)
    assert asker.infer("b", [0.5]) == 9
    status, answer = asker.send("POST", "/rollout/rollback", {"model": MODEL, "reason": "drill"})
    assert (status, answer["message"]) == (200, "model 'clicks': version 7 answers all requests")
    assert asker.infer("c", [0.5]) == 7


@pytest.mark.parametrize("path", ["/labels", "/rollout", "/rollout/promote", "/rollout/rollback"])
def test_changes_need_the_token(asker: Caller, path: str) -> None:
    for token in (None, "another-token-of-tests"):
        assert asker.send("POST", path, {}, token=token)[0] == 401


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/rollout", b"{", 400, "Invalid JSON"),
        ("/rollout", b"\xff", 400, "expected JSON in UTF-8"),
        ("/rollout", {"model": MODEL}, 400, "RolloutPlan.stable: field required"),
        ("/rollout", plan(5), 404, "has no version 5"),
        ("/rollout?again=maybe", plan(9), 400, "again: expected true or false, got 'maybe'"),
        ("/rollout/promote", {"model": "other"}, 400, "has no plan"),
        ("/rollout/promote", {}, 400, "model: field required"),
        ("/rollout/rollback", {"model": MODEL, "to": "10m"}, 400, "a moment in the past ends in -ago"),
        ("/rollout/rollback", {"model": MODEL, "to": "10m-ago"}, 400, "does not follow a run"),
        ("/labels", b"nonsense", 400, "nothing was taken"),
        ("/labels", b" " * (MAX_LABEL_BYTES + 1), 413, "send several requests"),
    ],
)
def test_what_cannot_be_done_is_told(asker: Caller, path: str, body: object, status: int, message: str) -> None:
    found, answer = asker.send("POST", path, body)
    assert found == status
    assert message.lower() in answer["error"].lower()


@contextmanager
def server_process(folder: Path) -> Iterator[tuple[Caller, subprocess.Popen[str]]]:
    command = [sys.executable, rollout_server.__file__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Caller(process.stdout.readline().strip()), process
        finally:
            process.kill()


@pytest.mark.parametrize("automatic", [True, False])
def test_a_rollback_that_was_answered_survives_kill_9(tmp_path: Path, automatic: bool) -> None:
    with server_process(tmp_path) as (asker, process):
        assert asker.send("POST", "/rollout", plan(8, share=1.0, bounds={"min_labels": 100}))[0] == 200
        if automatic:
            p, labels = clicks(500)
            assert asker.infer("r", p) == 8
            assert asker.send("POST", "/labels", {"request_id": "r", "label": labels})[0] == 200
        else:
            assert asker.send("POST", "/rollout/rollback", {"model": MODEL})[0] == 200
        process.send_signal(signal.SIGKILL)
        process.wait()
    with server_process(tmp_path) as (asker, _):
        assert {asker.infer(f"r-{number}", [0.5]) for number in range(20)} == {7}
        rollout = asker.send("GET", "/rollout")[1]["models"][MODEL]
        assert (rollout["plan"]["candidate"], rollout["rejected"]) == (None, [8])
        assert rollout["events"][-1]["automatic"] is automatic
