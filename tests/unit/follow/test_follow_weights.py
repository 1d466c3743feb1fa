"""Danger: rows that are newer than the dense weights they are used with, or weights that are a mix of two steps."""

from __future__ import annotations

import numpy as np

from followed_tables import Copies, FeedProcess, following, table, until, writer_at


def test_weights_arrive_when_they_change_and_all_at_once() -> None:
    current: dict[str, np.ndarray] = {"layer.weight": np.ones((2, 3), np.float32), "steps": np.array(1)}
    process, copies = FeedProcess({"item": table()}, dense=lambda: current), Copies()
    try:
        with following(copies, writer_at(process.address)):
            until(lambda: len(copies.weights) == 1)
            assert copies.weights[0]["layer.weight"].tolist() == [[1, 1, 1], [1, 1, 1]]
            process.feed._look_at_dense()  # equal weights are not sent again
            assert process.feed.dense_version == 1
            current = {"layer.weight": np.full((2, 3), 2, np.float32), "steps": np.array(2)}
            process.feed._look_at_dense()
            until(lambda: len(copies.weights) == 2)
            assert copies.weights[1]["layer.weight"].sum() == 12
            assert int(copies.weights[1]["steps"]) == 2
    finally:
        process.close()
