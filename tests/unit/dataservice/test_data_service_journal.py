"""Danger: a dispatcher that forgets what it handed out, or believes a damaged journal."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from monolith.dataservice.dataset import DatasetConfig, Split
from monolith.dataservice.dispatcher import DispatcherCalls, DispatcherConfig
from monolith.dataservice.journal import JobEvent, Journal, Registered, SplitGranted, SplitMade, TrainerJoined
from monolith.dataservice.protocol import DataCall, RegisterDataset
from monolith.errors import CorruptFileError, FencedError, StorageError
from monolith.testing import bit_flips
from monolith.transport.frames import decode, encode

EVENTS: list[JobEvent] = [
    Registered(job="é\n", dataset=DatasetConfig(kind="csv", paths=("a/*",), fields={"batch_size": 3})),
    TrainerJoined(job="é\n", trainer=0, trainers=2, session=1, nonce=5, epoch=0, granted=0),
    SplitMade(job="é\n", epoch=0, split=Split(number=0, file="a/1"), files={"pattern": 0, "after": "a/1"}),
    SplitGranted(job="é\n", epoch=0, trainer=0, split=0),
]


def written(folder: Path) -> bytes:
    with closing(Journal(folder)) as journal:
        for event in EVENTS:
            journal.append(event)
    return (folder / "journal").read_bytes()


def read(folder: Path) -> list[JobEvent]:
    with closing(Journal(folder)) as journal:
        return list(journal.read())


def test_what_was_written_is_read_by_the_next_process_which_goes_on(tmp_path: Path) -> None:
    written(tmp_path / "new" / "folder")
    assert read(tmp_path / "new" / "folder") == EVENTS
    written(tmp_path / "new" / "folder")
    assert read(tmp_path / "new" / "folder") == EVENTS * 2


def test_a_line_that_a_crash_cut_short_did_not_happen_and_is_written_over(tmp_path: Path) -> None:
    whole = written(tmp_path)
    start = whole.rindex(b"\n", 0, -1) + 1
    for size in range(start, len(whole)):
        (tmp_path / "journal").write_bytes(whole[:size])
        with closing(Journal(tmp_path)) as journal:
            assert list(journal.read()) == EVENTS[:3]
            journal.append(EVENTS[3])
        assert (tmp_path / "journal").read_bytes() == whole


def test_a_last_line_of_which_a_power_cut_left_zeros_did_not_happen(tmp_path: Path) -> None:
    whole = written(tmp_path)
    start = whole.rindex(b"\n", 0, -1) + 1
    (tmp_path / "journal").write_bytes(whole[:start] + bytes(20) + whole[start + 20 :])
    assert read(tmp_path) == EVENTS[:3]
    assert (tmp_path / "journal").read_bytes() == whole[:start]


def test_any_other_damage_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    whole = written(tmp_path)
    for done, damaged in bit_flips(whole[:-1], count=200, seed=1):
        (tmp_path / "journal").write_bytes(damaged + b"\n")
        with pytest.raises(CorruptFileError, match=r"journal: line \d+"):
            raise AssertionError(f"{done}: {read(tmp_path)}")


@pytest.mark.parametrize("text", [b"{}", b'{"event": "granted"}', b'{"event": "unheard of"}', b"[" * 100_000])
def test_a_line_with_a_true_checksum_must_still_be_an_event(tmp_path: Path, text: bytes) -> None:
    from monolith import _core

    tmp_path.joinpath("journal").write_bytes(b"%08x %s\n" % (_core.crc32c(text), text))
    with pytest.raises(CorruptFileError, match="line 1 is not an event"):
        read(tmp_path)


def test_two_dispatchers_cannot_have_one_journal(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)), pytest.raises(StorageError, match="another"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_an_event_that_could_not_be_made_durable_is_not_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with closing(Journal(tmp_path)) as journal:
        journal.append(EVENTS[0])
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            with pytest.raises(StorageError, match="cannot write: No space left"):
                journal.append(EVENTS[1])
        journal.append(EVENTS[2])
    assert read(tmp_path) == [EVENTS[0], EVENTS[2]]


def test_who_takes_a_journal_over_has_all_events_and_the_one_before_adds_none(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as hung:
        hung.append(EVENTS[0])
        with closing(Journal(tmp_path, take_over=True)) as successor:
            assert list(successor.read()) == EVENTS[:1]
            with pytest.raises(FencedError, match="taken this log over"):
                hung.append(EVENTS[1])
            successor.append(EVENTS[2])
            successor.require_own()
            with pytest.raises(FencedError):
                hung.require_own()
    assert read(tmp_path) == [EVENTS[0], EVENTS[2]]


def test_a_dispatcher_that_was_taken_over_answers_nothing_any_more(tmp_path: Path) -> None:
    def join(calls: DispatcherCalls, session: int) -> dict[str, object]:
        text = {"job": "j", "trainer": 0, "trainers": 1, "epoch": 0, "granted": 0, "session": session, "nonce": session}
        frame = encode(call=DataCall.JOIN_JOB, request=1, text=json.dumps(text))
        answer: dict[str, object] = json.loads(decode(calls.answer(frame)).text)
        return answer

    config = DispatcherConfig(folder=tmp_path)
    hung = DispatcherCalls(config)
    hung.jobs.register(RegisterDataset(job="j", dataset=DatasetConfig(kind="click_stream")))
    assert join(hung, 1) == {"joined": True, "session": 1}
    successor = DispatcherCalls(config.model_copy(update={"take_over": True}))
    assert join(hung, 1)["error"] == join(hung, 2)["error"] == "FencedError"
    assert join(successor, 2) == {"joined": True, "session": 2}
    for calls in (hung, successor):
        calls.close()
