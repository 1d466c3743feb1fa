"""Danger: one bad record stops the joiner, closes every window, or vanishes without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from join_oracle import QUIET, Shown, config_for, impression, join_all, labels_by_key, write_events, written
from monolith.streams import open_stream

NOW_SECS = 2_000.0
GOOD = Shown("good", 1_000_000)


def dead_letters(folder: Path) -> list[tuple[dict[str, bytes], bytes | None, bytes]]:
    stream = open_stream(f"{folder}/dead")
    with stream.reader() as reader:
        reader.assign({"dead/0": "start"})
        return [
            (dict(headers), key, value)
            for records in reader.poll(1000, 0)
            for headers, key, value in zip(records.headers or (), records.keys, records.values, strict=True)
        ]


@pytest.mark.parametrize(
    ("stream", "value", "reason"),
    [
        ("shown", b"", "empty"),
        ("shown", b"{" + b" " * 3000 + b"}", "too_large"),
        ("shown", b'{"key": "a", "time": 1', "not_json"),
        ("shown", b'["a", 1]', "not_json"),
        ("shown", b'{"key": "a", "time": 1000000, "x": NaN}', "not_json"),
        ("shown", b"\xff\xfe\x00", "not_json"),
        ("shown", b"[" * 2000, "not_json"),
        ("shown", b'{"time": 1000000}', "key"),
        ("shown", b'{"key": null, "time": 1000000}', "key"),
        ("shown", b'{"key": "", "time": 1000000}', "key"),
        ("shown", b'{"key": 1.5, "time": 1000000}', "key"),
        ("shown", b'{"key": true, "time": 1000000}', "key"),
        ("shown", b'{"key": "' + b"k" * 257 + b'", "time": 1000000}', "key"),
        ("shown", b'{"key": "a"}', "time"),
        ("shown", b'{"key": "a", "time": "soon"}', "time"),
        ("shown", b'{"key": "a", "time": true}', "time"),
        ("shown", b'{"key": "a", "time": 0}', "time"),
        ("shown", b'{"key": "a", "time": -5}', "time"),
        ("shown", b'{"key": "a", "time": 1e300}', "future"),
        ("shown", b'{"key": "a", "time": 5600001}', "future"),
        ("shown", b'{"key": "a", "time": 9223372036854775807}', "future"),
        ("shown", b'{"key": "a", "time": 1000000, "clicked": 1}', "column"),
        ("shown", b'{"key": "a", "time": 1000000, "sample_rate": 1}', "column"),
        ("acted", b'{"key": "a", "time": 1000000}', "type"),
        ("acted", b'{"key": "a", "time": 1000000, "action": ["click"]}', "type"),
        ("acted", b"\x00", "not_json"),
    ],
)
def test_a_bad_record_is_counted_kept_and_passed_over(tmp_path: Path, stream: str, value: bytes, reason: str) -> None:
    config = config_for(tmp_path, dead_letters={"stream": f"{tmp_path}/dead", "settings": QUIET}, max_record_bytes=2500)
    write_events(tmp_path, [], [])
    with open_stream(f"{tmp_path}/{stream}").writer() as writer:
        writer.append(value, key=b"its key")
    write_events(tmp_path, [GOOD], [])
    counts = join_all(config, clock=lambda: NOW_SECS)
    assert {name: count for name, count in counts.items() if name.startswith("bad_")} == {f"bad_{reason}": 1}
    assert set(labels_by_key(written(tmp_path / "examples"))) == {"good"}
    ((headers, key, kept),) = dead_letters(tmp_path)
    assert headers["dead-letter.reason"].startswith(reason.encode() + b": ")
    assert (headers["dead-letter.partition"], headers["dead-letter.offset"]) == (f"{stream}/0".encode(), b"0")
    assert (key in (b"its key", b"a"), kept) == (True, value)


def test_actions_that_are_not_joined_are_dead_letters_if_wanted(tmp_path: Path) -> None:
    dead = {"stream": f"{tmp_path}/dead", "settings": QUIET}
    config = config_for(tmp_path, dead_letters=dead, late="dead_letter", keep_secs=5, out_of_order_secs=0)
    write_events(tmp_path, [GOOD, Shown("later", 1_100_000)], [])
    with open_stream(f"{tmp_path}/acted").writer() as writer:
        writer.append(b'{"key": "good", "time": 1050000, "action": "click"}')
        writer.append(b'{"key": "never", "time": 1000000, "action": "buy"}')
        writer.append(b'{"key": "good", "time": 1000000, "action": "unknown"}')
    join_all(config, clock=lambda: NOW_SECS)
    with open_stream(f"{tmp_path}/shown").writer() as writer:
        writer.append(impression(Shown("expired", 900_000)))
    counts = join_all(config, clock=lambda: NOW_SECS)
    assert (counts["outside_actions"], counts["unmatched_actions"], counts["other_actions"]) == (1, 1, 1)
    assert counts["expired_impressions"] == 1
    reasons = sorted(
        (headers["dead-letter.reason"].partition(b":")[0], key) for headers, key, _ in dead_letters(tmp_path)
    )
    assert reasons == [(b"expired", b"expired"), (b"outside_actions", b"good"), (b"unmatched_actions", b"never")]


def test_integers_and_strings_are_one_key_and_fields_do_not_run_together(tmp_path: Path) -> None:
    both = ["request", "item"]
    config = config_for(
        tmp_path,
        impressions={"stream": f"{tmp_path}/shown", "key": both, "time": "time"},
        actions={"stream": f"{tmp_path}/acted", "key": both, "time": "time"},
    )
    write_events(tmp_path, [], [])
    with open_stream(f"{tmp_path}/shown").writer() as writer:
        writer.append(b'{"request": "a1", "item": 2, "time": 1000, "key": "first"}')
        writer.append(b'{"request": "a", "item": 12, "time": 1000.5, "key": "second"}')
    with open_stream(f"{tmp_path}/acted").writer() as writer:
        writer.append(b'{"request": "a1", "item": "2", "time": 1001, "action": "click"}')
    join_all(config, clock=lambda: NOW_SECS)
    found = labels_by_key(written(tmp_path / "examples"))
    assert {key: labels["clicked"] for key, labels in found.items()} == {"first": 1.0, "second": 0.0}
