"""The wire to a resident server: each question gets its answer, or is told that none will come."""

import asyncio

import pytest

from deepswe.sandbox import served, server
from deepswe.sandbox.served import Wire


class Server:
    """The other end of a wire: keeps what was sent, and answers what it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, list[bytes]]] = []
        self.wire = Wire(lambda data: self.sent.append(server.unpack(data[4:])))

    def answer(self, call: int, kind: int, *fields: bytes) -> None:
        self.wire.feed(server.pack(call, kind, *fields))

    @property
    def kinds(self) -> list[int]:
        return [kind for _, kind, _ in self.sent]


def run(work):
    async def main():
        return await work(Server())

    return asyncio.run(main())


def test_answers_go_to_those_who_asked_in_whatever_order_and_pieces_they_come():
    async def work(there):
        first = asyncio.ensure_future(there.wire.ask(server.READ, [b"a"], 5))
        second = asyncio.ensure_future(there.wire.ask(server.READ, [b"b"], 5))
        await asyncio.sleep(0)
        data = server.pack(2, server.DATA, b"B") + server.pack(1, server.DATA, b"A")
        for place in range(len(data)):
            there.wire.feed(memoryview(data)[place : place + 1])
        return await first, await second

    assert run(work) == ((server.DATA, [b"A"]), (server.DATA, [b"B"]))


def test_a_question_without_an_answer_in_time_is_taken_back(monkeypatch):
    monkeypatch.setattr(served, "SECOND_LOOK_S", 0.01)

    async def work(there):
        with pytest.raises(TimeoutError):
            await there.wire.ask(server.READ, [b"a"], 0.01)
        there.answer(1, server.DATA, b"late")
        return there.kinds

    assert run(work) == [server.READ, server.CANCEL]


def test_an_answer_that_comes_just_after_its_deadline_is_taken():
    async def work(there):
        asking = asyncio.ensure_future(there.wire.ask(server.READ, [b"a"], 0.01))
        await asyncio.sleep(0.05)
        there.answer(1, server.DATA, b"A")
        return await asking, there.kinds

    assert run(work) == ((server.DATA, [b"A"]), [server.READ])


def test_a_caller_that_gives_up_takes_its_question_back():
    async def work(there):
        asking = asyncio.ensure_future(there.wire.ask(server.EXEC, [], 5))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return there.kinds

    assert run(work) == [server.EXEC, server.CANCEL]


def test_whoever_waits_is_told_that_the_wire_is_lost_and_so_is_whoever_comes():
    async def work(there):
        asking = asyncio.ensure_future(there.wire.ask(server.EXEC, [], 5))
        await asyncio.sleep(0)
        there.wire.lose("gone")
        return await asking, await there.wire.ask(server.EXEC, [], 5), there.kinds, there.wire.lost

    assert run(work) == (None, None, [server.EXEC], "gone")


def test_a_greeting_is_awaited_and_one_that_will_not_come_is_no_greeting(monkeypatch):
    monkeypatch.setattr(served, "SECOND_LOOK_S", 0.01)

    async def greeted(there):
        there.answer(0, server.HELLO)
        return await there.wire.greeted(5)

    async def lost(there):
        asyncio.get_running_loop().call_soon(there.wire.lose, "gone")
        return await there.wire.greeted(5)

    async def late(there):
        return await there.wire.greeted(0.01)

    assert [run(work) for work in (greeted, lost, late)] == [True, False, False]
