"""Fixtures of the contract of streams: `kind` is each of the three kinds in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stream_kinds import KINDS, StreamKind, kind_of_streams


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamKind]:
    with kind_of_streams(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found
