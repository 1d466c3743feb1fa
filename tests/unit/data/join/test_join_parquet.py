"""Danger: files for batch training with other examples than the stream, or that do not say where they end in it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from join_oracle import QUIET, Acted, Shown, config_for, join_all, write_events, written
from monolith.data import Column, ParquetSource, StreamSource
from monolith.data.join import JoinConfig, Joiner, stream_positions
from monolith.errors import CorruptFileError, StreamGapError
from monolith.streams import open_stream

COLUMNS = {"key": "string", "time": "int64", "user": "int64"}
SHOWN = [Shown(f"k{n}", 1_000_000 + 1000 * n) for n in range(60)]
ACTED = [Acted(f"k{n}", 1_003_000 + 1000 * n, "click") for n in range(0, 60, 5)]


def config(folder: Path, **fields: object) -> JoinConfig:
    parquet = {"folder": f"{folder}/history", "columns": COLUMNS, "rows_per_file": 16}
    return config_for(folder, parquet=parquet, poll_records=7, out_of_order_secs=4, **fields)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "history").glob("*.parquet"))


def rows(folder: Path) -> list[dict[str, object]]:
    return [row for file in files(folder) for row in pa.parquet.read_table(file).to_pylist()]


def test_the_files_have_the_examples_of_the_stream(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN, ACTED)
    join_all(config(tmp_path))
    assert len(files(tmp_path)) > 3
    assert rows(tmp_path) == [one.fields for one in written(tmp_path / "examples")]
    columns = [
        Column(name="user", shape=()),
        Column(name="time", shape=()),
        Column(name="clicked", dtype="float32", shape=()),
        Column(name="sample_rate", dtype="float32", shape=()),
    ]
    from_files = list(ParquetSource(list(map(str, files(tmp_path))), columns, batch_size=1000))
    stream = open_stream(f"{tmp_path}/examples")
    from_stream = list(StreamSource(stream, columns, batch_size=1000, until_end=True))
    for name in ("user", "time", "clicked", "sample_rate"):
        one, other = (
            [value for batch in batches for value in batch[name].tolist()] for batches in (from_files, from_stream)
        )
        assert one == other
        assert len(one) == len(SHOWN)


def test_the_stream_continues_after_the_files(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN[:40], ACTED[:8])
    join_all(config(tmp_path))
    positions = stream_positions(files(tmp_path))
    assert positions == {"examples/0": 40}
    write_events(tmp_path, SHOWN[40:], ACTED[8:])
    with Joiner(config(tmp_path)) as joiner:
        joiner.run(until_end=True)
    stream = open_stream(f"{tmp_path}/examples")
    with stream.reader() as reader:
        reader.assign(positions)
        assert sum(map(len, reader.poll(1000, 0))) == 20


def test_files_are_whole_whenever_the_joiner_ends(tmp_path: Path) -> None:
    """Each joiner reads some more and vanishes without a checkpoint of what it wrote to files."""
    write_events(tmp_path, SHOWN, ACTED)
    given = config(tmp_path, state={"folder": f"{tmp_path}/state", "checkpoint_secs": 1e6})
    for polls in range(1, 20, 2):
        with Joiner(given) as joiner:
            assert joiner._open_units()
            for _ in range(polls):
                joiner._join(joiner._read())
            joiner._look(None)
        # What a kill in the middle of writing leaves.
        (tmp_path / "history" / ".examples-00000.parquet.x.tmp").write_bytes(b"PAR1")
    join_all(given)
    assert rows(tmp_path) == [one.fields for one in written(tmp_path / "examples")]
    assert stream_positions(files(tmp_path)) == {"examples/0": len(SHOWN)}


def test_a_missing_file_is_noticed(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN, ACTED)
    join_all(config(tmp_path))
    first, second, *others = files(tmp_path)
    # The oldest may be removed, as retention does.
    assert stream_positions([second, *others]) == {"examples/0": len(SHOWN)}
    with pytest.raises(StreamGapError, match="a file is missing"):
        stream_positions([first, *others])


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(CorruptFileError, match="has no positions of a stream"):
        stream_positions([tmp_path / "a.parquet"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(CorruptFileError):
        stream_positions([tmp_path / "b.parquet"])


def test_a_row_that_does_not_fit_is_a_dead_letter(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN[:3], [])
    with open_stream(f"{tmp_path}/shown").writer() as writer:
        writer.append(b'{"key": "odd", "time": 1004000, "user": "seven"}')
        writer.append(b'{"key": "spaced",\n "time": 1005000, "user": 9223372036854775807}\n')
    join_all(config(tmp_path, dead_letters={"stream": f"{tmp_path}/dead", "settings": QUIET}))
    found = {row["key"]: row["user"] for row in rows(tmp_path)}
    assert found == {"k0": 7, "k1": 7, "k2": 7, "spaced": 2**63 - 1}
    assert len(written(tmp_path / "examples")) == 5
    last = open_stream(f"{tmp_path}/dead").last("dead/0")
    assert last is not None
    assert last.headers is not None
    assert dict(last.headers[0])["dead-letter.reason"].startswith(b"parquet")
