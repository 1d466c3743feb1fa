"""Compare the ragged kernels with the torch code that they replace.

python benchmarks/ragged_kernels.py                every kernel, one torch thread
python benchmarks/ragged_kernels.py --threads 2    torch may use two threads; ours always run on the calling thread
python benchmarks/ragged_kernels.py --cpu-time     CPU time instead of wall-clock time, for a machine that is not idle

Both sides alternate on the same batches. A ratio is the median of the ratios of the turns, above 1 where ours is faster.
Before timing, the results of both sides are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from monolith.features import Ragged
from monolith.features.kernels import pool, split_by_shard, unique_with_inverse

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Contest:
    kernel: str
    batch: str
    torch_form: str
    ours: Callable[[], Tensors]
    theirs: Callable[[], Tensors]


def zipf_ids(n: int, exponent: float = 1.05, universe: int = 10_000_000) -> torch.Tensor:
    ranks = torch.rand(n, dtype=torch.float64)
    power = 1 - exponent
    drawn = ((universe**power - 1) * ranks + 1) ** (1 / power)
    return drawn.long() * 0x9E3779B97F4A7C1 % 2**62


def unique_contests() -> Iterator[Contest]:
    batches = {"zipf": zipf_ids, "uniform": lambda n: torch.randint(-(2**62), 2**62, (n,))}
    for name, draw in batches.items():
        for n in (16_384, 131_072, 1_048_576):
            ids = draw(n)

            def ours(ids: torch.Tensor = ids) -> Tensors:
                unique = unique_with_inverse(ids)
                return unique.ids, unique.inverse

            def theirs(ids: torch.Tensor = ids) -> Tensors:
                unique, inverse = torch.unique(ids, return_inverse=True)
                return unique, inverse

            yield Contest(
                kernel="unique_with_inverse",
                batch=f"{n:,} ids, {name}",
                torch_form="torch.unique(return_inverse=True)",
                ours=ours,
                theirs=theirs,
            )


def ragged_batch(rows: int, mean_length: int) -> Ragged:
    lengths = torch.randint(0, 2 * mean_length + 1, (rows,))
    splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Ragged(torch.empty(int(splits[-1]), dtype=torch.int64), splits)


def rowid_contests() -> Iterator[Contest]:
    for rows, mean_length in ((4096, 4), (65_536, 4), (4096, 40)):
        batch = ragged_batch(rows, mean_length)
        numbers, splits, values = torch.arange(rows), batch.offsets, batch.values
        yield Contest(
            kernel="value_rowids",
            batch=f"{rows:,} rows of 0..{2 * mean_length}",
            torch_form="torch.repeat_interleave",
            # A new Ragged each time, checks included: the second call on one would only return the first one's answer.
            ours=lambda values=values, splits=splits: (Ragged(values, splits).value_rowids(),),
            theirs=lambda numbers=numbers, splits=splits: (torch.repeat_interleave(numbers, splits.diff()),),
        )


def pool_contests() -> Iterator[Contest]:
    for rows, mean_length, dim in ((4096, 4, 16), (4096, 4, 64), (4096, 40, 16), (4096, 40, 64)):
        batch = ragged_batch(rows, mean_length)
        x = torch.randn(len(batch.values), dim)
        splits, rowids = batch.offsets, batch.value_rowids()
        what = f"{rows:,} bags of 0..{2 * mean_length}, dim {dim}"

        def index_add(x: torch.Tensor, rowids: torch.Tensor = rowids, rows: int = rows) -> torch.Tensor:
            return torch.zeros(rows, x.shape[1]).index_add(0, rowids, x)

        def segment(x: torch.Tensor, splits: torch.Tensor = splits) -> torch.Tensor:
            return torch.segment_reduce(x, "sum", offsets=splits)

        def segment_mean(x: torch.Tensor, splits: torch.Tensor = splits) -> torch.Tensor:
            return torch.segment_reduce(x, "sum", offsets=splits) / splits.diff().clamp(min=1).unsqueeze(1)

        forms = (
            ("sum", "index_add", index_add),
            ("sum", "segment_reduce", segment),
            ("mean", "segment_reduce", segment_mean),
        )
        for mode, name, form in forms:
            yield Contest(
                kernel=f"pool {mode}",
                batch=what,
                torch_form=f"torch.{name}",
                ours=lambda x=x, batch=batch, mode=mode: (pool(x, batch, mode=mode),),
                theirs=lambda x=x, form=form: (form(x),),
            )
            grad = torch.randn(rows, dim)
            yield Contest(
                kernel=f"pool {mode}, forward + backward",
                batch=what,
                torch_form=f"torch.{name}",
                ours=lambda x=x, batch=batch, mode=mode, grad=grad: _step(x, lambda r: pool(r, batch, mode=mode), grad),
                theirs=lambda x=x, form=form, grad=grad: _step(x, form, grad),
            )


def _step(x: torch.Tensor, form: Callable[[torch.Tensor], torch.Tensor], grad: torch.Tensor) -> Tensors:
    leaf = x.detach().requires_grad_()
    form(leaf).backward(grad)
    assert leaf.grad is not None
    return (leaf.grad,)


def split_contests() -> Iterator[Contest]:
    for n in (16_384, 1_048_576):
        for shards in (2, 5, 64):
            ids = torch.randint(0, 2**62, (n,))

            def ours(ids: torch.Tensor = ids, shards: int = shards) -> Tensors:
                split = split_by_shard(ids, shards)
                return split.ids, split.order, split.sizes

            def theirs(ids: torch.Tensor = ids, shards: int = shards) -> Tensors:
                owner = ids % shards
                order = torch.argsort(owner, stable=True)
                return ids[order], order, torch.bincount(owner, minlength=shards)

            yield Contest(
                kernel="split_by_shard",
                batch=f"{n:,} ids, {shards} shards",
                torch_form="argsort(ids % n, stable=True) + bincount",
                ours=ours,
                theirs=theirs,
            )
        split = split_by_shard(ids, 5)
        grouped = torch.randn(n, 16)

        def scatter(grouped: torch.Tensor = grouped, order: torch.Tensor = split.order) -> Tensors:
            out = torch.empty_like(grouped)
            out[order] = grouped
            return (out,)

        yield Contest(
            kernel="restore order",
            batch=f"{n:,} rows, dim 16",
            torch_form="out[order] = rows",
            ours=lambda split=split, grouped=grouped: (split.restore(grouped),),
            theirs=scatter,
        )


def check(contest: Contest) -> None:
    ours, theirs = contest.ours(), contest.theirs()
    if contest.kernel == "unique_with_inverse":  # torch sorts, we keep the order of first occurrence
        ours, theirs = (ours[0][ours[1]],), (theirs[0][theirs[1]],)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def timed(run: Callable[[], Tensors], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def measure(contest: Contest, turns: int, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Median seconds of ours and theirs, and the median of the turns' ratios."""
    check(contest)
    times = []
    for turn in range(turns + 2):
        if turn % 2:
            mine, other = timed(contest.ours, clock), timed(contest.theirs, clock)
        else:
            other, mine = timed(contest.theirs, clock), timed(contest.ours, clock)
        times.append((mine, other))
    times = times[2:]
    mine, other = (statistics.median(side) for side in zip(*times, strict=True))
    return mine, other, statistics.median(b / a for a, b in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="process CPU time; only fair with one thread")
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time adds up the threads' time; use it with --threads 1")
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"| kernel | batch | instead of ({options.threads} threads) | ours, ms | torch, ms | times faster |")
    print("|---|---|---|---:|---:|---:|")
    for contests in (unique_contests, rowid_contests, pool_contests, split_contests):
        for contest in contests():
            mine, other, ratio = measure(contest, options.turns, clock)
            print(
                f"| {contest.kernel} | {contest.batch} | {contest.torch_form} "
                f"| {mine * 1e3:.3f} | {other * 1e3:.3f} | {ratio:.1f} |"
            )


if __name__ == "__main__":
    main()
