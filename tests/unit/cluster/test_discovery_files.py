"""Danger: processes that find each other through files read half an address, or a predecessor's, or remove a successor's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from monolith import InvalidArgumentError
from monolith.cluster import HostServiceDiscovery


@pytest.fixture
def discovery(tmp_path: Path) -> HostServiceDiscovery:
    return HostServiceDiscovery(tmp_path / "job")


def test_who_registers_is_found_until_it_leaves(discovery: HostServiceDiscovery) -> None:
    discovery.register("ps", 1, "h1:1")
    discovery.register("ps", 0, "h0:1")
    assert list(discovery.query("ps").items()) == [(0, "h0:1"), (1, "h1:1")]
    discovery.deregister("ps", 0, "h0:1")
    discovery.deregister("ps", 1, "h1:1")
    discovery.deregister("ps", 1, "h1:1")
    assert discovery.query("ps") == {}


def test_registering_again_replaces(discovery: HostServiceDiscovery) -> None:
    discovery.register("ps", 0, "old:1")
    discovery.register("ps", 0, "new:1")
    assert discovery.query("ps") == {0: "new:1"}


def test_a_late_farewell_does_not_remove_the_successor(discovery: HostServiceDiscovery) -> None:
    discovery.register("ps", 0, "old:1")
    discovery.register("ps", 0, "new:1")
    discovery.deregister("ps", 0, "old:1")
    assert discovery.query("ps") == {0: "new:1"}


def test_names_are_apart_and_seen_by_others(discovery: HostServiceDiscovery, tmp_path: Path) -> None:
    discovery.register("ps", 0, "h0:1")
    discovery.register("worker", 0, "[::1]:2")
    other = HostServiceDiscovery(str(tmp_path / "job"))
    assert (other.query("ps"), other.query("worker"), other.query("chief")) == ({0: "h0:1"}, {0: "[::1]:2"}, {})


def test_the_file_is_the_one_of_the_original(discovery: HostServiceDiscovery, tmp_path: Path) -> None:
    discovery.register("worker", 12, "h0:1")
    assert (tmp_path / "job" / "worker" / "12").read_text() == "h0:1"
    assert [path.name for path in (tmp_path / "job" / "worker").iterdir()] == ["12"]


@pytest.mark.parametrize("content", [b"", b"h0", b"h0:1\n", b"\xff\xfe"])
def test_a_file_without_an_address_is_nobody(discovery: HostServiceDiscovery, tmp_path: Path, content: bytes) -> None:
    discovery.register("ps", 1, "h1:1")
    (tmp_path / "job" / "ps" / "0").write_bytes(content)
    (tmp_path / "job" / "ps" / ".3.tmp").write_bytes(b"h3:1")
    assert discovery.query("ps") == {1: "h1:1"}
    discovery.register("ps", 0, "h0:1")
    assert discovery.query("ps") == {0: "h0:1", 1: "h1:1"}


def test_all_can_be_taken_back_at_once(discovery: HostServiceDiscovery, tmp_path: Path) -> None:
    discovery.deregister_all()
    for name in ("ps", "worker"):
        discovery.register(name, 0, "h0:1")
    (tmp_path / "job" / "notes").write_text("kept")
    discovery.deregister_all()
    assert (discovery.query("ps"), discovery.query("worker")) == ({}, {})
    assert (tmp_path / "job" / "notes").read_text() == "kept"


def test_readers_never_see_half_an_address(discovery: HostServiceDiscovery) -> None:
    addresses = ["short:1", "a-much-longer-name.of.a.machine.example:65535"]
    discovery.register("ps", 0, addresses[0])

    def write() -> None:
        for turn in range(300):
            discovery.register("ps", 0, addresses[turn % 2])

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert discovery.query("ps")[0] in addresses
    writer.join()


@pytest.mark.parametrize(
    ("name", "index", "addr", "field"),
    [
        ("../ps", 0, "h:1", "name"),
        ("", 0, "h:1", "name"),
        (".", 0, "h:1", "name"),
        ("a/b", 0, "h:1", "name"),
        ("ps\n", 0, "h:1", "name"),
        ("ps", -1, "h:1", "index"),
        ("ps", 0, "h", "address"),
    ],
)
def test_wrong_arguments_touch_no_file(
    discovery: HostServiceDiscovery, tmp_path: Path, name: str, index: int, addr: str, field: str
) -> None:
    for call in (discovery.register, discovery.deregister):
        with pytest.raises(InvalidArgumentError, match=f"^{field}: expected"):
            call(name, index, addr)
    assert list(tmp_path.iterdir()) == []
    if field == "name":
        with pytest.raises(InvalidArgumentError, match=r"^name: expected"):
            discovery.query(name)
