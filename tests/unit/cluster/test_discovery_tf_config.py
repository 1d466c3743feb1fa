"""Danger: with a chief listed separately every worker has the wrong index, and two of them have the same."""

from __future__ import annotations

import json

import pytest

from monolith import ConfigError, InvalidArgumentError
from monolith.cluster import ClusterSpec, Task, TfConfigServiceDiscovery, parse_tf_config

CLUSTER = {"chief": ["h0:1"], "ps": ["h1:1", "h2:1"], "worker": ["h3:1", "h4:1", "h5:1"]}


def discovery(kind: str, index: int, **cluster: object) -> TfConfigServiceDiscovery:
    return TfConfigServiceDiscovery({"cluster": CLUSTER | cluster, "task": {"type": kind, "index": index}})


def test_the_chief_is_worker_0_and_the_others_follow() -> None:
    found = discovery("worker", 1)
    assert found.query("ps") == {0: "h1:1", 1: "h2:1"}
    assert found.query("worker") == {0: "h0:1", 1: "h3:1", 2: "h4:1", 3: "h5:1"}
    assert (found.server_type, found.index, found.addr) == ("worker", 2, "h4:1")


@pytest.mark.parametrize(
    ("kind", "index", "expected"), [("chief", 0, ("worker", 0, "h0:1")), ("ps", 1, ("ps", 1, "h2:1"))]
)
def test_every_process_knows_which_one_it_is(kind: str, index: int, expected: tuple[str, int, str]) -> None:
    found = discovery(kind, index)
    assert (found.server_type, found.index, found.addr) == expected


def test_without_a_chief_workers_keep_their_index() -> None:
    found = discovery("worker", 1, chief=[])
    assert found.query("worker") == {0: "h3:1", 1: "h4:1", 2: "h5:1"}
    assert (found.index, found.addr) == (1, "h4:1")


def test_nothing_can_be_changed() -> None:
    with discovery("ps", 0) as found:
        found.register("ps", 0, "elsewhere:1")
        found.deregister("ps", 0, "h1:1")
        found.deregister_all()
        assert found.query("ps") == {0: "h1:1", 1: "h2:1"}


def test_another_name_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expected 'ps' or 'worker', got 'chief'"):
        discovery("ps", 0).query("chief")


def test_a_spec_comes_back_from_its_own_text() -> None:
    spec, task = ClusterSpec(ps=("h1:1",), worker=("h3:1", "[::1]:4")), Task(type="worker", index=1)
    assert parse_tf_config(spec.tf_config(task)) == (spec, task)
    assert "chief" not in spec.tf_config(task)


def test_specs_are_equal_exactly_when_nobody_moved() -> None:
    spec = ClusterSpec(ps=("h1:1", "h2:1"))
    assert spec == ClusterSpec(ps=("h1:1", "h2:1"))
    assert spec != ClusterSpec(ps=("h2:1", "h1:1"))


def test_what_other_schedulers_add_is_left_out() -> None:
    text = json.dumps({
        "cluster": CLUSTER | {"evaluator": ["h9:1"]},
        "task": {"type": "evaluator", "index": 0, "trial": "1"},
        "environment": "cloud",
    })  # fmt: skip
    found = TfConfigServiceDiscovery(text)
    assert found.server_type == "evaluator"
    assert found.query("worker")[0] == "h0:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected JSON"),
        ("[]", 'the keys "cluster" and "task"'),
        ('{"cluster": {}}', 'the keys "cluster" and "task"'),
        ('{"cluster": {"ps": "h1:1"}, "task": {"type": "ps"}}', "ClusterSpec.ps"),
        ('{"cluster": {"ps": ["h1"]}, "task": {"type": "ps"}}', "expected host:port"),
        ('{"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "ps"}}', "ClusterSpec.chief"),
        ('{"cluster": {"ps": ["h1:1"]}, "task": {"index": 0}}', "Task.type"),
        ('{"cluster": {"ps": ["h1:1"]}, "task": {"type": "ps", "index": "0"}}', "Task.index"),
        ('{"cluster": {"ps": ["h1:1"]}, "task": {"type": "ps", "index": 1}}', "to be one of the cluster"),
        ('{"cluster": {"ps": ["h1:1"]}, "task": {"type": "worker", "index": 0}}', "to be one of the cluster"),
    ],
)
def test_a_wrong_text_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TfConfigServiceDiscovery(text)
