"""`python -m tests.endpoint_server`: serve until ended; prints the address and the key."""

from __future__ import annotations

import argparse
import asyncio

from deepswe.config import MicroTasks
from tests.endpoint_server.faults import Faults
from tests.endpoint_server.server import KEY, Endpoint, serve
from tests.endpoint_server.solver import Solver


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=2)
    parser.add_argument("--heldout", type=int, default=100)
    parser.add_argument("--faults", type=float, default=0.0)
    parser.add_argument("--lies", type=float, default=0.0)
    parser.add_argument("--slow-s", type=float, default=30.0)
    given = parser.parse_args()
    tasks = MicroTasks(train=given.train, heldout=given.heldout, unseen=0)
    endpoint = Endpoint(Solver(tasks), Faults(given.faults, given.lies), slow_s=given.slow_s)
    async with serve(endpoint) as url:
        print(url, KEY, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
