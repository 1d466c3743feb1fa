"""Danger: small requests that hold the event loop until all are answered, so that none is refused and health checks time out."""

from __future__ import annotations

import asyncio

from monolith.serve.server.asgi import _RUNS_PER_ITERATION, _Turns


def test_a_few_requests_run_per_iteration_in_the_order_they_came() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        turns, order, iterations = _Turns(), [], []
        iteration = 0

        async def request(number: int) -> None:
            await turns.take()
            order.append(number)
            iterations.append(iteration)

        tasks = [asyncio.create_task(request(number)) for number in range(5 * _RUNS_PER_ITERATION)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iteration += 1
        return order, iterations

    order, iterations = asyncio.run(scenario())
    assert order == sorted(order)
    assert max(iterations.count(one) for one in set(iterations)) == _RUNS_PER_ITERATION


def test_a_request_that_was_cancelled_takes_no_turn() -> None:
    async def scenario() -> int:
        turns, ran = _Turns(), 0

        async def request() -> None:
            nonlocal ran
            await turns.take()
            ran += 1

        tasks = [asyncio.create_task(request()) for _ in range(3 * _RUNS_PER_ITERATION)]
        await asyncio.sleep(0)
        for task in tasks[_RUNS_PER_ITERATION:-1]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.take()
        return ran

    assert asyncio.run(scenario()) == _RUNS_PER_ITERATION + 1
