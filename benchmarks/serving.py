"""Measure serving: what answering takes on top of the work that no server can avoid.

python benchmarks/serving.py                      every case
python benchmarks/serving.py --cases predict      `Predictor.predict` compared with its floor
python benchmarks/serving.py --cases servers      `monolith serve` compared with other model servers, see setup_peers.sh
python benchmarks/serving.py --cases servers --peers mlserver,kserve --turn-secs 1 --rounds 3
python benchmarks/serving.py --json               the same as JSON

`predict`: both sides run in one process on one thread and alternate on the same batches. `servers`: every server is a process or
several, all are up, and one at a time is asked over 8 connections. Before timing, results are compared. A ratio is the median
of the ratios of the rounds. Processor time is that of all processes of a side, so it is meaningful on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from click_models import TorchFM, tower
from contestants import PeerFailedError, PeerUnavailableError
from machine import describe
from model_servers import GROUPS, PROTOCOLS, Endpoint, Load, median, running
from monolith import EmbeddingBagCollection, Feature, Head, Predictor, _core, load, set_num_threads
from monolith.features import Batch
from monolith.serve import export_model
from peers.serving_model import DIM, NAMES, ROWS, TABLES

BATCHES = (1, 64, 512)

Rows = list[dict[str, object]]


class ClickModel(nn.Module):
    """26 embeddings -> FM + MLP 416-128-64-1. `stacked`: their vectors come as one tensor."""

    heads = (Head(name="click"),)

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.stacked = stacked
        stack = {"stack": "all"} if stacked else {}
        self.embeddings = EmbeddingBagCollection([Feature(name=name, dim=DIM, **stack) for name in NAMES])
        self.pairs = TorchFM()
        self.deep = tower(TABLES * DIM, 128, 64, 1)

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)
        return self.dense(rows["all"] if self.stacked else torch.stack([rows[name] for name in NAMES], dim=1))

    def dense(self, vectors: Tensor) -> Tensor:
        """[B, 26, 16] -> [B]."""
        return (self.pairs(vectors) + self.deep(vectors.flatten(1))).squeeze(1)


def trained_model(*, stacked: bool) -> ClickModel:
    """Return a model whose tables are full."""
    torch.manual_seed(0)
    model = ClickModel(stacked=stacked).eval()
    ids = np.arange(ROWS)
    for table in model.embeddings.store.tables.values():
        table.assign(ids, torch.randn(ROWS, DIM) * 0.1)
    return model


class Floor:
    """One fused lookup of ids that are already in one array, and the dense layers, eagerly."""

    def __init__(self, model: ClickModel, predictor: Predictor, rows: int) -> None:
        self.model = model
        (store,) = predictor.stores.values()
        self.tables = [store.tables[name].core for name in NAMES]
        self.modes = np.full(TABLES, _core.Pooling.SUM.value, dtype=np.uint8)
        columns = np.arange(TABLES) * DIM
        self.places = np.stack([np.full(TABLES, rows), np.zeros(TABLES, dtype=np.int64), 0 * columns, columns], axis=1)
        self.rows = rows

    def __call__(self, ids: np.ndarray) -> Tensor:
        """Int64 [tables * rows] -> predictions [rows]."""
        with torch.inference_mode():
            vectors = torch.empty(self.rows, TABLES * DIM)
            _core.lookup_packed(self.tables, self.modes, ids, None, self.places, [vectors.numpy()])
            return torch.sigmoid(self.model.dense(vectors.view(self.rows, TABLES, DIM)))


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one side in one round, microseconds per call."""

    p50: float
    processor: float


def measured(call: Callable[[int], object], turns: range) -> Times:
    """Time `call` once for each of `turns`."""
    walls = []
    begin = time.process_time()
    for turn in turns:
        start = time.perf_counter()
        call(turn)
        walls.append(time.perf_counter() - start)
    processor = time.process_time() - begin
    return Times(p50=statistics.median(walls) * 1e6, processor=processor / len(turns) * 1e6)


def contest(ours: Callable[[int], object], theirs: Callable[[int], object], *, rounds: int, calls: int) -> list[Times]:
    """Return the medians over rounds of both sides, and of their ratios."""
    for side in (ours, theirs):
        measured(side, range(calls // 4))
    pairs = []
    for number in range(rounds):
        turns = range(number * calls, (number + 1) * calls)
        # Whoever begins finds other caches than the second.
        order = (ours, theirs) if number % 2 else (theirs, ours)
        times = {side: measured(side, turns) for side in order}
        pairs.append((times[ours], times[theirs]))
    sides = [[ours for ours, _ in pairs], [theirs for _, theirs in pairs]]
    ratios = [Times(p50=a.p50 / b.p50, processor=a.processor / b.processor) for a, b in pairs]
    return [
        Times(p50=statistics.median(t.p50 for t in side), processor=statistics.median(t.processor for t in side))
        for side in (*sides, ratios)
    ]


def predict_case(options: argparse.Namespace) -> Rows:
    """`Predictor.predict` compared with the floor."""
    found: Rows = []
    generator = np.random.default_rng(0)
    for stacked in (True, False):
        model = trained_model(stacked=stacked)
        example = {name: torch.arange(4) for name in NAMES}
        with tempfile.TemporaryDirectory() as folder:
            predictor = load(export_model(model, example, folder, heads=model.heads))
        for rows in options.batches:
            drawn = [generator.integers(0, ROWS, (TABLES, rows)) for _ in range(64)]
            packed = [np.ascontiguousarray(ids).reshape(-1) for ids in drawn]
            batches: list[Mapping[str, Tensor]] = [
                {name: torch.from_numpy(ids[number].copy()) for number, name in enumerate(NAMES)} for ids in drawn
            ]
            floor = Floor(model, predictor, rows)
            for batch, ids in zip(batches, packed, strict=True):
                torch.testing.assert_close(predictor.predict(batch)["click"], floor(ids), rtol=0, atol=1e-6)
            calls = max(20, options.calls // max(1, rows // 32))
            ours, theirs, ratio = contest(
                lambda turn, predictor=predictor, batches=batches: predictor.predict(batches[turn % 64]),
                lambda turn, packed=packed, floor=floor: floor(packed[turn % 64]),
                rounds=options.rounds,
                calls=calls,
            )
            found.append(
                {
                    "model": "one stack" if stacked else "26 outputs",
                    "rows": rows,
                    "predict p50 us": round(ours.p50, 1),
                    "floor p50 us": round(theirs.p50, 1),
                    "ratio": round(ratio.p50, 2),
                    "predict cpu us": round(ours.processor, 1),
                    "floor cpu us": round(theirs.processor, 1),
                    "cpu ratio": round(ratio.processor, 2),
                }
            )
    return found


def save_for_peers(model: ClickModel, folder: Path) -> None:
    """Write rows and weights for `peers/serving_model.py`."""
    folder.mkdir()
    tables = model.embeddings.store.tables
    rows = np.concatenate([tables[name].lookup_entry(np.arange(ROWS)).values.numpy() for name in NAMES])
    np.save(folder / "rows.npy", rows)
    for name, weight in model.deep.state_dict().items():
        np.save(folder / f"{name}.npy", weight.numpy())


def servers_case(options: argparse.Namespace) -> Rows:
    """`monolith serve` compared with other model servers."""
    model = trained_model(stacked=True)
    found: Rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export = export_model(model, {name: torch.arange(4) for name in NAMES}, folder / "export", heads=model.heads)
        save_for_peers(model, folder / "weights")
        predictor = load(export)
        for group in GROUPS:
            peers = [peer for peer in group if peer in options.peers]
            if not peers:
                continue
            with running(["monolith", *peers], export=export, weights=folder / "weights", logs=folder) as servers:
                endpoints = [
                    Endpoint(server=server, protocol=protocol, packed=packed)
                    for server in servers
                    for protocol in PROTOCOLS[server.name]
                    # Ours has a column for each feature. Peers are also given all ids as one tensor, their best case.
                    for packed in ((False,) if server.name == "monolith" else (False, True))
                ]
                for rows in options.request_rows:
                    found += _servers_contest(options, predictor, endpoints, rows, folder)
    return found


def _servers_contest(
    options: argparse.Namespace, predictor: Predictor, endpoints: list[Endpoint], rows: int, folder: Path
) -> Rows:
    drawn = [np.random.default_rng(seed).integers(0, ROWS, (rows, TABLES)) for seed in range(options.rounds + 1)]
    batches = [{name: torch.from_numpy(ids[:, n].copy()) for n, name in enumerate(NAMES)} for ids in drawn]
    expected = predictor.predict(batches[0])["click"].numpy()
    alone = measured(lambda turn: predictor.predict(batches[turn % len(batches)]), range(options.calls)).processor / 1e3
    requests: dict[Endpoint, int] = {}
    for endpoint in endpoints:
        body = endpoint.body(drawn[0])
        try:
            endpoint.server.wait_until_answers(endpoint, body)
            np.testing.assert_allclose(endpoint.ask(body), expected, rtol=0, atol=1e-5)
            warm = endpoint.load(body, requests=100, connections=options.connections, folder=folder)
        except PeerFailedError as error:
            sys.stderr.write(f"{endpoint.label}: left out, {error}\n")
            continue
        requests[endpoint] = max(100, int(warm.requests_per_second * options.turn_secs))
    loads: dict[Endpoint, list[Load]] = {endpoint: [] for endpoint in requests}
    for turn in range(options.rounds):
        order = list(requests)
        random.Random(turn).shuffle(order)
        for endpoint in order:
            body = endpoint.body(drawn[1 + turn])
            loads[endpoint].append(
                endpoint.load(body, requests=requests[endpoint], connections=options.connections, folder=folder)
            )
    ours = {endpoint.protocol: loads[endpoint] for endpoint in requests if endpoint.server.name == "monolith"}
    return [_server_row(endpoint, rows, loads[endpoint], ours, alone) for endpoint in requests]


def _server_row(
    endpoint: Endpoint, rows: int, loads: list[Load], ours: Mapping[str, list[Load]], alone: float
) -> dict[str, object]:
    middle = median(loads)
    pairs = list(zip(loads, ours[endpoint.family], strict=True))
    return {
        "rows": rows,
        "server": endpoint.label,
        "requests/s": round(middle.requests_per_second),
        "p50 ms": round(middle.p50_ms, 2),
        "p99 ms": round(middle.p99_ms, 2),
        "cpu ms": round(middle.processor_ms, 3),
        "over predict": round(middle.processor_ms - alone, 3) if endpoint.server.name == "monolith" else "",
        "cpu ratio": round(statistics.median(a.processor_ms / b.processor_ms for a, b in pairs), 2),
        "rate ratio": round(statistics.median(b.requests_per_second / a.requests_per_second for a, b in pairs), 2),
    }


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {"predict": predict_case, "servers": servers_case}
PEERS = [peer for group in GROUPS for peer in group]


def shown(case: str, rows: Rows) -> str:
    """Return a table for the terminal."""
    if not rows:
        return f"{case}: nothing was measured"
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        [case, *("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)]
    )


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated: %(default)s")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=400, help="calls of a round at one row, fewer for larger batches")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=PEERS, help="servers to compare with")
    parser.add_argument("--request-rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64])
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--turn-secs", type=float, default=2.0, help="seconds of load on a server in a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unknown = [case for case in options.cases.split(",") if case not in CASES]
    if unknown:
        parser.error(f"--cases: there is no {unknown[0]!r}, expected some of {', '.join(CASES)}")
    torch.set_num_threads(1)
    set_num_threads(1)
    report: dict[str, object] = {"machine": describe()}
    for case in options.cases.split(","):
        try:
            rows = CASES[case](options)
        except PeerUnavailableError as missing:
            parser.error(str(missing))
        report[case] = rows
        if not options.json:
            sys.stdout.write(shown(case, rows) + "\n")
    if options.json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
