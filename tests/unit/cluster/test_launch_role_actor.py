"""Danger: lines of a role on another machine that are lost, shown twice, or fill the memory of a launcher that is away."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from monolith.cluster.launch.ray import Look, RoleActor


def actor(code: str, folder: Path, **environment: str) -> RoleActor:
    return RoleActor(["-S", "-c", code], environment, str(folder / "logs" / "worker-0.log"), str(folder))


def all_looks(role: RoleActor) -> tuple[list[str], Look]:
    look = role.look(wait=0.1)
    lines = list(look.lines)
    while look.code is None:
        look = role.look(look.life, look.next, wait=0.1)
        lines += look.lines
    return lines, look


def test_every_line_comes_once_and_with_the_code_the_last_of_them(tmp_path: Path) -> None:
    role = actor(
        "import os; print(os.getcwd(), os.environ['MARK'])\nfor i in range(300): print(i)\nraise SystemExit(3)",
        tmp_path,
        MARK="x",
    )
    lines, look = all_looks(role)
    assert lines == [f"{tmp_path} x", *map(str, range(300))]
    assert look.code == 3
    assert (tmp_path / "logs" / "worker-0.log").read_text().splitlines() == lines


def test_who_asks_for_another_life_gets_this_one_from_its_beginning(tmp_path: Path) -> None:
    role = actor("print('one'); print('two')", tmp_path)
    all_looks(role)
    assert role.look("another", 57).lines == ("one", "two")


def test_only_so_many_lines_wait(tmp_path: Path) -> None:
    role = actor("for i in range(2500): print(i)", tmp_path)
    while role.look().code is None:
        pass
    look = role.look()
    assert look.lines == tuple(map(str, range(1500, 2500)))
    assert look.next == 2500
    assert role.look(look.life, 2498).lines == ("2498", "2499")


@pytest.mark.parametrize(
    ("says_host", "expected"),
    [
        (None, ["[]", '{"tls_cert": "c"}']),
        ("option", ["['--host', '10.0.0.7']", '{"tls_cert": "c"}']),
        ("variable", ["[]", '{"tls_cert": "c", "host": "10.0.0.7"}']),
    ],
)
def test_a_role_is_told_the_address_of_its_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says_host: Literal["option", "variable"] | None,
    expected: list[str],
) -> None:
    monkeypatch.setattr("monolith.cluster.launch.ray.get_local_ip", lambda: "10.0.0.7")
    code = "import os, sys; print(sys.argv[1:]); print(os.environ['MONOLITH_SERVER'])"
    environment = {"MONOLITH_SERVER": '{"tls_cert": "c"}'}
    role = RoleActor(["-S", "-c", code], environment, str(tmp_path / "log"), str(tmp_path), says_host=says_host)
    assert all_looks(role)[0] == expected


def test_asked_to_end_it_ends(tmp_path: Path) -> None:
    role = actor("print('ready'); import time; time.sleep(600)", tmp_path)
    assert role.look(wait=60.0).lines == ("ready",)
    role.ask_to_end()
    assert all_looks(role)[1].code == -15


def test_a_folder_this_machine_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RoleActor(["-c", ""], {}, str(tmp_path / "log"), str(tmp_path / "nowhere"))
