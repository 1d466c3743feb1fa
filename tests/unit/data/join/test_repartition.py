"""Danger: a stream copied under another key is refused as an input of a joiner, or a wrong state loses records unnoticed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from join_oracle import QUIET, Acted, Shown, action, config_for, impression, join_all, joined, labels_by_key, written
from monolith.cli.stream import stream as stream_command
from monolith.data.join import JoinConfig, Repartition
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, StorageError
from monolith.streams import open_stream
from monolith.streams.stream import partition_of_key

SHOWN = [Shown(f"k{n}", 1_000_000 + 100 * n) for n in range(60)]
ACTED = [Acted(f"k{n}", 1_003_000 + 100 * n, "click") for n in range(0, 60, 4)]


def write_by_other_keys(folder: Path) -> None:
    """Impressions by user in three partitions, actions by item in two."""
    for name, partitions, values in (
        ("by_user", 3, [(b"user %d" % (n % 7), impression(one)) for n, one in enumerate(SHOWN)]),
        ("by_item", 2, [(b"item %d" % (n % 5), action(one)) for n, one in enumerate(ACTED)]),
    ):
        with open_stream(f"{folder}/{name}", partitions=partitions, settings=QUIET).writer() as writer:
            for key, value in values:
                writer.append(value, key=key, timestamp=77, headers=(("kept", b"1"),))


def copy(folder: Path, source: str, target: str, partitions: int = 2, key: tuple[str, ...] = ("key",)) -> Repartition:
    read_from = open_stream(f"{folder}/{source}")
    write_to = open_stream(f"{folder}/{target}", partitions=partitions, settings=QUIET)
    copying = Repartition(read_from, write_to, key=key, state=folder / f"state of {target}")
    with closing(copying):
        copying.run(until_end=True)
    return copying


def config(folder: Path) -> JoinConfig:
    # The two streams are read in another order than that of time.
    return config_for(folder, out_of_order_secs=100)


def test_streams_with_other_keys_are_joined_after_a_copy(tmp_path: Path) -> None:
    write_by_other_keys(tmp_path)
    runner = CliRunner()
    for source, target in (("by_user", "shown"), ("by_item", "acted")):
        command = ["repartition", f"{tmp_path}/{source}", f"{tmp_path}/{target}", "--key", "key", "--partitions", "2",
                   "--state", f"{tmp_path}/{source} state", "--set-target", "fsync=false", "--until-end"]  # fmt: skip
        ended = runner.invoke(stream_command, command, catch_exceptions=False)
        assert ended.exit_code == 0
        assert (
            f"{len(SHOWN) if target == 'shown' else len(ACTED)} records copied, 0 of them without key" in ended.output
        )
    join_all(config(tmp_path))
    assert labels_by_key(written(tmp_path / "examples")) == joined(SHOWN, ACTED, config(tmp_path))


def test_without_a_copy_they_are_not_joined(tmp_path: Path) -> None:
    """Or the test above would pass with streams that fit each other."""
    write_by_other_keys(tmp_path)
    for source, name in (("by_user", "shown"), ("by_item", "acted")):
        (tmp_path / source).rename(tmp_path / name)
    with pytest.raises(InvalidArgumentError, match="monolith stream repartition"):
        join_all(config(tmp_path))


def test_a_copy_is_the_record_with_another_key(tmp_path: Path) -> None:
    write_by_other_keys(tmp_path)
    with open_stream(f"{tmp_path}/by_user", settings=QUIET).writer() as writer:
        writer.append(b"no JSON", key=b"own", partition=1)
        writer.append(b'{"other":1}', partition=1)
    copying = copy(tmp_path, "by_user", "shown", 4)
    assert copying.counts == {"copied": len(SHOWN) + 2, "without_key": 2}
    found = {}
    target = open_stream(f"{tmp_path}/shown")
    with target.reader() as reader:
        reader.assign(dict.fromkeys(target.partitions(), "start"))
        for records in reader.poll(1000, 0):
            assert records.headers is not None
            for value, key, timestamp, headers in zip(
                records.values, records.keys, records.timestamps, records.headers, strict=True
            ):
                found[value] = key
                assert int(records.partition[-1]) == (0 if key is None else partition_of_key(key, range(4)))
                assert headers[-1][0] == "copied-from"
                if b"time" in value:
                    assert (timestamp, headers[0]) == (77, ("kept", b"1"))
    assert found == {impression(one): one.key.encode() for one in SHOWN} | {b"no JSON": b"own", b'{"other":1}': None}


def test_what_is_copied_is_not_copied_again_and_new_records_are(tmp_path: Path) -> None:
    write_by_other_keys(tmp_path)
    assert copy(tmp_path, "by_item", "acted").counts["copied"] == len(ACTED)
    assert copy(tmp_path, "by_item", "acted").counts == {}
    source = open_stream(f"{tmp_path}/by_item", settings=QUIET)
    source.add_partitions(1)  # type: ignore[attr-defined]
    with source.writer() as writer:
        writer.append(action(ACTED[0]), partition=2)
    assert copy(tmp_path, "by_item", "acted").counts["copied"] == 1


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_by_other_keys(tmp_path)
    copy(tmp_path, "by_item", "acted")
    with pytest.raises(ConfigError, match=r"key: the state in .* was made with \['key'\], got \['action'\]"):
        copy(tmp_path, "by_item", "acted", key=("action",))
    with pytest.raises(ConfigError, match="source: the state in"):
        copy(tmp_path, "by_user", "acted")
    open_stream(f"{tmp_path}/acted").add_partitions(1)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"target: .* Keys move when a target gets other partitions"):
        copy(tmp_path, "by_item", "acted")
    (state,) = (tmp_path / "state of acted").glob("*.json")
    whole = json.loads(state.read_text())
    for damage in ("{", "[]", json.dumps({**whole, "positions": {"by_item/0": "end"}})):
        state.write_text(damage)
        with pytest.raises(CorruptFileError, match="is damaged; restore it"):
            copy(tmp_path, "by_item", "acted")
    state.unlink()
    with pytest.raises(InvalidArgumentError, match=r"target: acted/\d has records, but .* has no state"):
        copy(tmp_path, "by_item", "acted")
    with pytest.raises(InvalidArgumentError, match="target: expected another stream than the source"):
        copy(tmp_path, "by_item", "by_item")


def test_a_state_has_one_process(tmp_path: Path) -> None:
    write_by_other_keys(tmp_path)
    source, target = open_stream(f"{tmp_path}/by_item"), open_stream(f"{tmp_path}/a", partitions=1, settings=QUIET)
    with (
        closing(Repartition(source, target, key=["key"], state=tmp_path / "state")),
        pytest.raises(StorageError, match="another writer"),
    ):
        Repartition(source, target, key=["key"], state=tmp_path / "state")
