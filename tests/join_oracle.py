"""What a joiner must give, by comparing every action with every impression, and what its tests share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from monolith.data.join import JoinConfig, Joiner, origin_of
from monolith.streams import Stream, open_stream

QUIET = {"fsync": "false"}
LABELS = [
    {"name": "clicked", "actions": {"click": 1.0}},
    {"name": "value", "actions": {"buy": 5.0, "cart": 2.0, "click": 1.0}},
]
TYPES = ("click", "buy", "cart")


class Shown(NamedTuple):
    key: str
    time: int


class Acted(NamedTuple):
    key: str
    time: int
    type: str


def labels_of(types: Iterable[str]) -> dict[str, float]:
    """The labels of `LABELS`, spelled out."""
    has = set(types)
    value = 5.0 if "buy" in has else 2.0 if "cart" in has else 1.0 if "click" in has else 0.0
    return {"clicked": float("click" in has), "value": value}


def joined(shown: Sequence[Shown], acted: Sequence[Acted], config: JoinConfig) -> dict[str, dict[str, float]]:
    """Labels by key if nothing comes late: what the times of the events alone say. Of repeated impressions the first counts."""
    first: dict[str, int] = {}
    for event in shown:
        first.setdefault(event.key, event.time)
    lead, window = config.lead_secs * 1000, config.window_secs * 1000
    return {
        key: labels_of(a.type for a in acted if a.key == key and time - lead <= a.time <= time + window)
        for key, time in first.items()
    }


@dataclass
class _Known:
    time: int
    types: set[str] = field(default_factory=set)
    emitted: bool = False


@dataclass
class SlowJoin:
    """The same as `WindowJoin`, event by event with lists, for events that come late."""

    config: JoinConfig
    width: int
    watermark: int = 0
    known: dict[str, _Known] = field(default_factory=dict)
    early: list[Acted] = field(default_factory=list)
    out: list[tuple[str, int, bool, dict[str, float]]] = field(default_factory=list)
    """Key, ordinal, whether it corrects, labels."""
    lost: list[str] = field(default_factory=list)

    def _over(self, time: float) -> bool:
        """Whether the bucket of `time` is closed."""
        return time // self.width < self.watermark // self.width

    @property
    def _times(self) -> tuple[float, float, float]:
        return self.config.lead_secs * 1000, self.config.window_secs * 1000, self.config.keep_ms

    def _at_once(self, types: Iterable[str]) -> bool:
        emit_on = self.config.types if self.config.emit_on is None else self.config.emit_on
        return self.config.emit != "window_end" and bool(set(types) & set(emit_on))

    def _emit(self, key: str, ordinal: int, *, corrects: bool = False) -> None:
        self.out.append((key, ordinal, corrects, labels_of(self.known[key].types)))

    def _finish(self, key: str) -> None:
        one = self.known[key]
        one.emitted = True
        if self.config.emit != "fast":
            self._emit(key, 0)
        elif one.types:
            self._emit(key, 1)

    def shown(self, event: Shown) -> None:
        lead, window, keep = self._times
        if event.key in self.known:
            self.lost.append("duplicate_impressions")
            return
        if self._over(event.time + window + keep):
            self.lost.append("expired_impressions")
            return
        mine = [a for a in self.early if a.key == event.key]
        self.early = [a for a in self.early if a.key != event.key]
        one = self.known[event.key] = _Known(event.time)
        if self.config.emit == "fast":
            self._emit(event.key, 0)
        for action in mine:
            if event.time - lead <= action.time <= event.time + window:
                one.types.add(action.type)
            else:
                self.lost.append("outside_actions")
        if self._over(event.time + window):
            self.lost.append("late_impressions")
            self._finish(event.key)
        elif self._at_once(one.types):
            self._finish(event.key)

    def acted(self, event: Acted) -> None:
        lead, window, keep = self._times
        one = self.known.get(event.key)
        if one is None:
            if self._over(event.time + lead + window + keep):
                self.lost.append("unmatched_actions")
            elif any(a.key == event.key and a.time == event.time and a.type == event.type for a in self.early):
                self.lost.append("duplicate_actions")
            else:
                self.early.append(event)
        elif not one.time - lead <= event.time <= one.time + window:
            self.lost.append("outside_actions")
        elif event.type in one.types:
            self.lost.append("duplicate_actions")
        elif not one.emitted:
            one.types.add(event.type)
            if self._at_once([event.type]):
                self._finish(event.key)
        else:
            self.lost.append("late_actions")
            if self.config.late == "correction":
                one.types.add(event.type)
                self._emit(event.key, 1 + len(one.types), corrects=True)

    def passed(self, watermark: int) -> None:
        lead, window, keep = self._times
        self.watermark = max(self.watermark, watermark)
        for key, one in list(self.known.items()):
            if not one.emitted and self._over(one.time + window):
                self._finish(key)
            if self._over(one.time + window + keep):
                del self.known[key]
        # Actions of a key expire together, with the last of them.
        for key in {a.key for a in self.early}:
            mine = [a for a in self.early if a.key == key]
            if all(self._over(a.time + lead + window + keep) for a in mine):
                self.lost += ["unmatched_actions"] * len(mine)
                self.early = [a for a in self.early if a.key != key]


def config_for(folder: Path, **fields: object) -> JoinConfig:
    """A joiner of the streams `shown` and `acted` in `folder`, whose output is `examples`."""
    tree: dict[str, Any] = {
        "impressions": {"stream": f"{folder}/shown", "key": ["key"], "time": "time", "time_unit": "ms"},
        "actions": {"stream": f"{folder}/acted", "key": ["key"], "time": "time", "time_unit": "ms"},
        "window_secs": 10,
        "lead_secs": 2,
        "labels": LABELS,
        "output": {"stream": f"{folder}/examples", "settings": QUIET},
        "state": {"folder": f"{folder}/state"},
    }
    return JoinConfig.from_json(json.dumps(tree | fields))


def impression(event: Shown) -> bytes:
    return json.dumps({"key": event.key, "time": event.time, "user": 7}).encode()


def action(event: Acted) -> bytes:
    return json.dumps({"key": event.key, "time": event.time, "action": event.type}).encode()


def write_events(folder: Path, shown: Iterable[Shown], acted: Iterable[Acted], *, partitions: int = 1) -> None:
    """Append events to the streams `shown` and `acted`, which are made if they are not there."""
    for name, events in (("shown", list(map(_of_shown, shown))), ("acted", list(map(_of_acted, acted)))):
        with open_stream(f"{folder}/{name}", partitions=partitions, settings=QUIET).writer() as writer:
            for key, value in events:
                writer.append(value, key=key)


def _of_shown(event: Shown) -> tuple[bytes, bytes]:
    return event.key.encode(), impression(event)


def _of_acted(event: Acted) -> tuple[bytes, bytes]:
    return event.key.encode(), action(event)


class Written(NamedTuple):
    """A record of the output."""

    origin: tuple[str, int, int]
    headers: Mapping[str, bytes]
    value: bytes
    fields: dict[str, Any]


def written(url: str | Path) -> list[Written]:
    """All records of a stream, partition by partition."""
    stream: Stream = open_stream(str(url))
    found: list[Written] = []
    with stream.reader() as reader:
        for partition in stream.partitions():
            reader.assign({partition: "start"})
            end = stream.first_offset_at(1 << 62)[partition]
            at = 0
            while at < end:
                batches = reader.poll(10_000, 0.1)
                for records in batches:
                    at = records.next_offset
                    for value, headers in zip(records.values, records.headers or [()] * len(records), strict=True):
                        origin = origin_of(headers)
                        assert origin is not None
                        fields = json.loads(value) if value[:1] == b"{" else {}
                        found.append(Written(origin, dict(headers), value, fields))
    return found


def labels_by_key(records: Iterable[Written]) -> dict[str, dict[str, float]]:
    """The labels of examples. An impression that is there twice is an error."""
    found: dict[str, dict[str, float]] = {}
    for one in records:
        assert one.fields["key"] not in found, f"{one.fields['key']} is there twice"
        found[one.fields["key"]] = {name: one.fields[name] for name in ("clicked", "value")}
    return found


def join_all(config: JoinConfig, **options: object) -> dict[str, int]:
    """Join until the end, and return the counters."""
    with Joiner(config, **options) as joiner:  # type: ignore[arg-type]
        joiner.run(until_end=True)
        return joiner.status().counts
