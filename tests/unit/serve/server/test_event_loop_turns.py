"""Danger: small requests that hold the event loop until all are answered, so that none is refused and health checks time out."""

from __future__ import annotations

import asyncio

from monolith.serve.server.scheduling import RUNS_PER_ITERATION, Turns


def test_a_few_requests_run_per_iteration_in_the_order_they_came() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        turns, order, iterations = Turns(), [], []
        count, iteration = 5 * RUNS_PER_ITERATION, 0

        def run(number: int) -> None:
            order.append(number)
            iterations.append(iteration)

        for number in range(count):
            turns.take(lambda number=number: run(number))
        for iteration in range(1, count):  # noqa: B007 - `run` reads it
            await asyncio.sleep(0)
        return order, iterations

    order, iterations = asyncio.run(scenario())
    assert order == list(range(5 * RUNS_PER_ITERATION))
    assert max(iterations.count(one) for one in set(iterations)) == RUNS_PER_ITERATION


def test_one_that_comes_later_does_not_overtake_those_that_wait() -> None:
    async def scenario() -> list[int]:
        turns, order = Turns(), []
        for number in range(2 * RUNS_PER_ITERATION):
            turns.take(lambda number=number: order.append(number))
        await asyncio.sleep(0)
        turns.take(lambda: order.append(-1))
        for _ in range(5):
            await asyncio.sleep(0)
        return order

    assert asyncio.run(scenario()) == [*range(2 * RUNS_PER_ITERATION), -1]
