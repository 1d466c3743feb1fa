"""Format results as tables: Markdown for docs/benchmarks.md, and the same on the terminal."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from peers import OURS, PEERS
from speed import Measurement, SpeedResult

DISTRIBUTION_NAMES = {"zipf": "Zipf(1.05)", "uniform": "uniform"}


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def _number(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:{form}}"


def _ratio(m: Measurement | None) -> str:
    if m is None or m.ours_over_peer is None:
        return "-"
    if m.peer == OURS:
        return "1"
    if m.peer.startswith("limit"):
        return f"{m.ours_over_peer:.0%}"
    return f"{_number(m.ours_over_peer)}x"


def speed_tables(result: SpeedResult) -> list[Table]:
    by_case = {(m.peer, m.operation, m.distribution, m.dim, m.threads): m for m in result.measurements}
    peers = list(dict.fromkeys(m.peer for m in result.measurements))
    order = [spec.name for spec in PEERS]
    peers.sort(key=lambda name: (name not in order, order.index(name) if name in order else 0))
    cases = [(op, dist) for dist in DISTRIBUTION_NAMES for op in ("lookup", "train")]
    tables = []
    for dim, threads in dict.fromkeys((m.dim, m.threads) for m in result.measurements):
        columns = ["M ids/s"]
        for operation, distribution in cases:
            columns += [f"{operation}, {DISTRIBUTION_NAMES[distribution]}", "ours / it"]
        rows = []
        for peer in peers:
            found = [by_case.get((peer, op, dist, dim, threads)) for op, dist in cases]
            if any(found):
                cells = [[_number(m.m_ids_per_s if m else None), _ratio(m)] for m in found]
                rows.append([peer, *(cell for pair in cells for cell in pair)])
        tables.append(Table(title=f"dim {dim}, {threads} thread(s)", columns=columns, rows=rows))
    return tables


def scaling_table(result: SpeedResult) -> list[Table]:
    speed = {(m.peer, m.operation, m.distribution, m.dim, m.threads): m.m_ids_per_s for m in result.measurements}
    most = max((m.threads for m in result.measurements), default=1)
    dims = list(dict.fromkeys(m.dim for m in result.measurements))
    cases = [(op, dist, dim) for dim in dims for dist in DISTRIBUTION_NAMES for op in ("lookup", "train")]
    rows = []
    for peer in dict.fromkeys(m.peer for m in result.measurements):
        cells = []
        for case in cases:
            one, many = speed.get((peer, *case, 1)), speed.get((peer, *case, most))
            cells.append(f"{many / one:.2f}x" if one and many else "-")
        rows.append([peer, *cells])
    if most == 1 or all(cell == "-" for row in rows for cell in row[1:]):
        return []
    columns = [f"{most} threads / 1", *(f"{op}, {DISTRIBUTION_NAMES[dist]}, dim {dim}" for op, dist, dim in cases)]
    return [Table(title="Threads", columns=columns, rows=rows)]


def _pause(calls: dict[str, float] | None) -> str:
    """The longest call on the clock, and of the thread's own work: the difference is the machine's doing."""
    return f"{_number(calls['longest_ms'])} ({_number(calls['longest_work_ms'])})" if calls else "-"


def growth_tables(results: list[dict[str, Any]]) -> list[Table]:
    if not results:
        return []
    rows, memory = [], []
    for r in results:
        label = f"{r['peer']}, dim {r['dim']}, {r['threads']} thread(s)"
        one_row = r.get("one_row")
        rows.append(
            [
                label,
                f"{r['rows']:,}",
                _number(r["inserts_m_per_s"]),
                _number(r["slowest_window_m_per_s"]),
                _number(r["batch_call"]["median_ms"]),
                _pause(r["batch_call"]),
                _pause(one_row and one_row["growing"]),
                _pause(one_row and one_row["steady"]),
            ]
        )
        samples = r["samples"]
        last = samples[-1]
        reported = [s["reported_ratio"] for s in samples if s["reported_ratio"] is not None]
        memory.append(
            [
                label,
                _number(last["reported_bytes_per_row"], ".1f"),
                _number(max(reported), ".3f") if reported else "-",
                _number(last["resident_bytes_per_row"], ".1f"),
                _number(max(s["resident_ratio"] for s in samples), ".3f"),
                _number(r["peak_resident_ratio"], ".3f"),
            ]
        )
    speed_columns = ["", "new ids", "M inserts/s", "slowest 1 M rows", "batch call, median ms", "longest (work) ms"]
    speed_columns += ["one-row call, longest (work) ms", "the same without growth"]
    memory_columns = ["", "bytes/row at the end", "worst ratio", "resident bytes/row at the end", "worst ratio"]
    memory_columns += ["peak, by the rows at the end"]
    return [
        Table(title="Growing from empty, in steps of 16,384 new ids", columns=speed_columns, rows=rows),
        Table(title="Memory, ratio to rows x (payload + 16 bytes)", columns=memory_columns, rows=memory),
    ]


def disk_tables(results: list[dict[str, Any]]) -> list[Table]:
    rows = []
    for r in results:
        gigabytes = r["bytes"] / 1e9
        rates = {name: gigabytes / statistics.median(r[name]) for name in ("save", "write", "load", "read")}
        saved = statistics.median(w / s for w, s in zip(r["write"], r["save"], strict=True))
        loaded = statistics.median(p / o for p, o in zip(r["read"], r["load"], strict=True))
        cold = "cold" if r["cached_share"] < 0.01 else f"warm, {r['cached_share']:.0%} cached"
        rows.append(
            [
                f"dim {r['dim']}, {r['threads']} thread(s), {gigabytes:.2f} GB ({cold})",
                *(_number(rates[name]) for name in ("save", "write")),
                f"{saved:.0%}",
                *(_number(rates[name]) for name in ("load", "read")),
                f"{loaded:.0%}",
            ]
        )
    columns = ["GB/s", "save", "plain write + fsync", "save / write", "load", "plain read", "load / read"]
    return [Table(title="Disk", columns=columns, rows=rows)] if rows else []


def bars(speed: SpeedResult, growth: list[dict[str, Any]], disk: list[dict[str, Any]]) -> list[Table]:
    """The bars of the issue, each with the worst case measured in this run."""
    found: list[tuple[str, float, list[float]]] = []

    def add(name: str, bar: float, values: list[float]) -> None:
        if values:
            found.append((name, bar, values))

    def ratios(peer: str, operation: str) -> list[float]:
        chosen = [m for m in speed.measurements if m.peer == peer and m.operation == operation]
        return [m.ours_over_peer for m in chosen if m.ours_over_peer is not None]

    for fbgemm in ("fbgemm", "fbgemm+hugepages"):
        add(f"lookup / {fbgemm}", 0.9, ratios(fbgemm, "lookup"))
        add(f"train / {fbgemm}", 2.5, ratios(fbgemm, "train"))
    for bag in ("embeddingbag", "embeddingbag+hugepages"):
        add(f"train / {bag}", 5, ratios(bag, "train"))
    add("train / tfra", 10, ratios("tfra", "train"))
    add("train / embeddingbag+dict", 20, ratios("embeddingbag+dict", "train"))
    add("lookup / limit", 0.6, ratios("limit: probe + gather", "lookup"))
    add("train / limit", 0.6, ratios("limit: lookup, then update", "train"))
    add("train / limit, knowing the rows", 0.6, ratios("limit: the same, knowing the rows", "train"))
    mine = [m for m in speed.measurements if m.peer == OURS]
    ours = {(m.operation, m.distribution, m.dim, m.threads): m.m_ids_per_s for m in mine}
    add("2 threads / 1", 1.7, [v / ours[(*k[:3], 1)] for k, v in ours.items() if k[3] == 2 and (*k[:3], 1) in ours])
    grown = [r for r in growth if r["peer"] == OURS]
    add("M inserts/s per thread, slowest 1 M rows", 10, [r["slowest_window_m_per_s"] / r["threads"] for r in grown])
    # For these two less is better: inverted, so that one comparison serves all.
    add("1 / worst memory ratio", 1 / 1.2, [1 / max(s["resident_ratio"] for s in r["samples"]) for r in grown])
    calls = [r["one_row"]["growing"] for r in grown if "one_row" in r] + [r["batch_call"] for r in grown]
    add("20 ms / longest pause", 1, [20 / call["longest_ms"] for call in calls])
    add("20 ms / longest pause by its own work", 1, [20 / call["longest_work_ms"] for call in calls])
    for name, plain in (("save", "write"), ("load", "read")):
        shares = [statistics.median(p / o for p, o in zip(r[plain], r[name], strict=True)) for r in disk]
        add(f"{name} / plain {plain}", 0.6, shares)
    rows = [
        [name, _number(bar), _number(min(values)), _number(max(values)), "yes" if min(values) >= bar else "**no**"]
        for name, bar, values in found
    ]
    columns = ["", "bar", "worst case", "best case", "reached in all cases"]
    return [Table(title="Bars", columns=columns, rows=rows)] if rows else []


def markdown(head: dict[str, Any], tables: list[Table]) -> str:
    lines = [f"Command: `{head['command']}`", ""]
    lines.append("Machine: " + "; ".join(f"{name} {value}" for name, value in head["machine"].items()) + ".")
    lines += ["", head["method"]]
    if head["disturbed"]:
        lines.append(f"Other processes used the core in {head['disturbed']:.0%} of the one-thread turns.")
    lines += ["", "Peers:"]
    notes = {spec.name: spec.note for spec in PEERS}
    for name, versions in head["versions"].items():
        packages = ", ".join(f"{package} {version}" for package, version in versions.items())
        lines.append(f"- {name}: {notes[name]} ({packages})")
    lines += [f"- {name}: skipped, {reason}" for name, reason in head["skipped"].items()]
    return "\n".join(lines) + "\n\n" + "\n".join(table.markdown() for table in tables)


def show(tables: list[Table]) -> None:
    """Drawn on a terminal; as Markdown into a file or a pipe, where rich would squeeze everything into 80 columns."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not console.is_terminal:
        print("\n".join(table.markdown() for table in tables))
        return
    for table in tables:
        view = RichTable(title=table.title, title_justify="left")
        for number, column in enumerate(table.columns):
            view.add_column(column, justify="left" if number == 0 else "right")
        for row in table.rows:
            view.add_row(*row)
        console.print(view)
