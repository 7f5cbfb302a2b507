"""Work that is always done in the same thread.

torch has a team of threads for each thread that calls it, whose members look for work for a while after each piece of
it, and the C library a heap for each. Where updates go to whichever thread of a pool is free, the teams are in each
other's way: on two cores, an update of a small model took nearly twice as long.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OwnThread:
    """A thread for work that is awaited, one piece after another; a context, at whose end it is left."""

    def __init__(self, name: str) -> None:
        """Args:
        name: of the thread, for those who look at the process.
        """
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """What `work` returns or raises; the like of `asyncio.to_thread`, for which it can stand.

        Who is cancelled here does not wait for what is under way, but the event loop does at its end, so that nobody
        takes the run for over before it is.
        """
        future = self._pool.submit(partial(contextvars.copy_context().run, work, *arguments, **options))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            asyncio.get_running_loop().run_in_executor(None, wait, (future,))
            raise

    def close(self) -> None:
        """No more work; what is under way is not waited for here."""
        self._pool.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
