"""A policy that plays back a script, and a renderer of bare bytes: no torch, no transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deepswe.errors import PolicyError, boundary
from deepswe.policy.base import Completion, ObservationRole, Renderer, Sampling
from deepswe.types import Message, Role

_ROLE_IDS: dict[Role, int] = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
_END = 260


class ByteRenderer:
    """UTF-8 bytes as ids 0-255, one id per role and one that ends a message.

    A message is its role's id, its bytes and the end id. Nothing in a text can be taken for one of these ids.
    """

    vocabulary = 261
    stop_tokens = frozenset({_END})

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The conversation and the id that opens the assistant's turn."""
        parts = [token for message in messages for token in _message(message.role, message.content)]
        return (*parts, _ROLE_IDS["assistant"])

    def observation(
        self, text: str, *, role: ObservationRole | None = None, truncated: bool = False
    ) -> tuple[int, ...]:
        """One message and the id that opens the assistant's next turn; led by the end id after a truncated turn."""
        return ((_END,) if truncated else ()) + _message(role or "user", text) + (_ROLE_IDS["assistant"],)

    def completion(self, text: str) -> tuple[int, ...]:
        """The bytes of the text and the end id."""
        return (*_encode(text), _END)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes among the tokens; bytes that are no UTF-8 become U+FFFD, or what they were made of."""
        raw = bytes([token for token in tokens if token < 256])
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")

    def conversation(self, tokens: Sequence[int]) -> tuple[Message, ...]:
        """The messages of a stream: the inverse of what the other methods append to each other.

        Raises:
            PolicyError: the tokens are no such stream.
        """
        roles: dict[int, Role] = {token: role for role, token in _ROLE_IDS.items()}
        messages: list[Message] = []
        at = 0
        while at < len(tokens) - 1 or (at < len(tokens) and tokens[at] != _ROLE_IDS["assistant"]):
            if tokens[at] not in roles:
                raise PolicyError(f"token {at} is {tokens[at]} where a message begins; pass a stream of this renderer")
            try:
                end = tokens.index(_END, at)
            except ValueError as error:
                raise PolicyError(f"the message at token {at} has no end; pass a stream of this renderer") from error
            messages.append(Message(roles[tokens[at]], self.decode(tokens[at + 1 : end])))
            at = end + 1
        return tuple(messages)

    def read_observation(self, tokens: Sequence[int]) -> str:
        """The text of the one message among the tokens."""
        body = tuple(tokens[1:] if tokens and tokens[0] == _END else tokens)
        framed = len(body) >= 3 and body[-2:] == (_END, _ROLE_IDS["assistant"])
        if not framed or body[0] not in (_ROLE_IDS["user"], _ROLE_IDS["tool"]):
            raise PolicyError(
                f"{len(body)} tokens starting with {body[:4]} are no observation; pass those that observation() made"
            )
        return self.decode(body[1:-2])


def _encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode("utf-8", "surrogatepass"))


def _message(role: Role, text: str) -> tuple[int, ...]:
    return (_ROLE_IDS[role], *_encode(text), _END)


@dataclass(slots=True)
class _Play:
    turns: Iterator[str]
    length: int = 0
    played: int = 0


class ScriptedPolicy:
    """Plays one script per trajectory, turn by turn; every log-prob is 0.

    Args:
        renderer: the one that the loop renders with.
        script: trajectory name -> its turns. A generator is sent each observation (``observation = yield turn``), as
            `Suite.reference` gives it; any other iterator is simply read on.
    """

    version = 0

    def __init__(self, renderer: Renderer, script: Callable[[str], Iterator[str]]) -> None:
        self._renderer = renderer
        self._script = script
        self._plays: dict[str, _Play] = {}

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        """The script's next turn, cut at `sampling.max_tokens`. A stream that got shorter starts the script anew.

        Raises:
            PolicyError: the script failed or has no more turns.
        """
        play = self._plays.get(trajectory)
        if play is None or len(stream) < play.length:
            with boundary("policy.scripted", PolicyError):
                play = self._plays[trajectory] = _Play(self._script(trajectory))
        text = self._turn(trajectory, play, stream)
        tokens = self._renderer.completion(text)
        cut = tokens[: sampling.max_tokens]
        play.length = len(stream) + len(cut)
        play.played += 1
        return Completion(cut, (0.0,) * len(cut), "stop" if len(cut) == len(tokens) else "length", self.version)

    def _turn(self, trajectory: str, play: _Play, stream: Sequence[int]) -> str:
        with boundary("policy.scripted", PolicyError):
            try:
                if play.played and isinstance(play.turns, Generator):
                    return str(play.turns.send(self._renderer.read_observation(stream[play.length :])))
                return next(play.turns)
            except StopIteration as error:
                raise PolicyError(
                    f"the script of trajectory {trajectory!r} ended after {play.played} turns and one more was asked; "
                    "let it end with a call to finish"
                ) from error

    async def release(self, trajectory: str) -> None:
        """Forget the trajectory's script."""
        play = self._plays.pop(trajectory, None)
        if play is not None and isinstance(play.turns, Generator):
            play.turns.close()

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        """Scripts need no lock-step: this does nothing but release the names at the end."""
        try:
            yield
        finally:
            for name in names:
                await self.release(name)
