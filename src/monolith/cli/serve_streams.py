"""The streams of `monolith serve`: the one that requests are written to, and the one that labels come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.cli.options import read_yaml
from monolith.errors import ConfigError

if TYPE_CHECKING:
    from monolith.serve.request_log import RequestLog
    from monolith.serve.rollout.label_stream import LabelStream
    from monolith.serve.rollout.router import RolloutRouter

__all__ = ["ServedStreams"]


@dataclass(frozen=True, kw_only=True)
class ServedStreams:
    """The options of `monolith serve` about streams."""

    log_requests: str | None = None
    log_share: float = 1.0
    log_without: Sequence[str] = ()
    labels_from: str | None = None
    labels: Sequence[str] = ()
    settings_file: Path | None = None

    def settings(self) -> dict[str, str]:
        """Return what the file of settings has."""
        tree = {} if self.settings_file is None else read_yaml(self.settings_file)
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in tree.items()}

    def open_log(self) -> RequestLog | None:
        """Return the log of requests, whose stream is made if there is none. None if requests are not logged."""
        if self.log_requests is None:
            return None
        from monolith.serve.request_log import RequestLog, RequestLogConfig
        from monolith.streams import open_stream

        config = RequestLogConfig(share=self.log_share, without=tuple(self.log_without))
        return RequestLog(open_stream(self.log_requests, settings=self.settings(), partitions=1), config)

    def open_labels(self, router: RolloutRouter | None, folder: Path | None) -> LabelStream | None:
        """Return the reader of labels, which a rollout takes. None if labels do not come from a stream."""
        if self.labels_from is None:
            return None
        if router is None or folder is None:
            raise ConfigError("--labels-from: needs --rollout-dir, where predictions are judged by labels")
        from monolith.serve.rollout.label_stream import LabelStream
        from monolith.streams import open_stream

        stream = open_stream(self.labels_from, settings=self.settings())
        columns = dict(map(_column_and_head, self.labels or ["label"]))
        return LabelStream(stream, router.add_labels, folder / "labels.position.json", columns=columns)


def _column_and_head(text: str) -> tuple[str, str | None]:
    column, equals, head = text.partition("=")
    if not column or (equals and not head):
        raise ConfigError(f"--label: expected COLUMN or COLUMN=HEAD, got {text!r}")
    return column, head or None
