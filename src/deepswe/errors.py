"""Every error this package raises, and the one boundary that attributes a foreign failure.

    DeepsweError
    ├── ConfigError            a recipe or an override is wrong
    ├── TaskError              a task cannot be used
    │   └── BuildError         its repository or environment cannot be built
    ├── SandboxError           the sandbox itself failed (never: the command in it)
    │   ├── SandboxUnavailable this machine cannot run that backend
    │   ├── SandboxStartError  one sandbox did not start
    │   │   └── SandboxUnsupported  it was asked for what its backend cannot honour
    │   └── SandboxDied        a live sandbox stopped answering
    ├── EnvironmentFault       an environment (ours or a user's) broke its contract
    ├── PolicyError            the engine or the renderer failed
    │   └── EndpointError      a remote model's endpoint did
    │       ├── EndpointRefused   it does not take the request; the same one will never do
    │       ├── EndpointBusy      it asks to come back later (429)
    │       ├── EndpointFailed    it failed itself (5xx)
    │       ├── EndpointTimeout   it did not answer in time
    │       ├── EndpointCut       the connection broke, or the answer stopped in the middle
    │       ├── EndpointGarbled   what it answered cannot be read
    │       └── EndpointMiscount  its token counts are missing or impossible
    ├── GradingError           grading could not come to a verdict
    ├── TrainingError          the learner cannot go on
    ├── StoreError             a record cannot be written or read
    └── RunError               a run directory cannot be used

Each message says what failed, with which value, and what to do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType


class DeepsweError(Exception):
    """Base of all errors of this package. `place` names the part in which the failure began, once."""

    place: str | None = None


class ConfigError(DeepsweError):
    """A recipe, an override or an argument is wrong."""


class TaskError(DeepsweError):
    """A task cannot be used as it is."""


class BuildError(TaskError):
    """A repository or its environment cannot be built."""


class SandboxError(DeepsweError):
    """The sandbox itself failed. A command that fails inside it is an `ExecResult`, not this."""


class SandboxUnavailable(SandboxError):
    """This machine cannot run the backend; the message names the setting to change or another backend."""


class SandboxStartError(SandboxError):
    """One sandbox did not start."""


class SandboxUnsupported(SandboxStartError):
    """A spec or a recipe asks for what the backend cannot honour; the message names it."""


class SandboxDied(SandboxError):
    """A sandbox that ran has stopped answering; whatever it held is lost."""


class EnvironmentFault(DeepsweError):
    """An environment, ours or a user's, raised or broke its contract."""


class PolicyError(DeepsweError):
    """The engine, the renderer or the tokenizer failed."""


class EndpointError(PolicyError):
    """A remote model's endpoint failed. `retry_after_s`: how long it asks to be left alone; 0 if it does not say."""

    retry_after_s: float = 0.0


class EndpointRefused(EndpointError):
    """It does not take the request (4xx): a wrong key, a wrong model, a wrong field. Asking again changes nothing."""


class EndpointBusy(EndpointError):
    """It asks to come back later (429)."""


class EndpointFailed(EndpointError):
    """It failed itself (5xx)."""


class EndpointTimeout(EndpointError):
    """It did not answer, or fell silent, for longer than allowed."""


class EndpointCut(EndpointError):
    """It cannot be reached, the connection broke, or the answer stopped in the middle."""


class EndpointGarbled(EndpointError):
    """What it answered is no answer in its own format."""


class EndpointMiscount(EndpointError):
    """Its token counts are missing or impossible, and the recipe requires them."""


class GradingError(DeepsweError):
    """Grading could not come to a verdict."""


class TrainingError(DeepsweError):
    """The learner cannot go on."""


class StoreError(DeepsweError):
    """A record cannot be written or read back."""


class RunError(DeepsweError):
    """A run directory cannot be used."""


class _Boundary:
    """See `boundary`. No generator: those cost three times as much, and each turn of an attempt passes several."""

    __slots__ = ("_place", "_wrap")

    def __init__(self, place: str, wrap: type[DeepsweError]) -> None:
        self._place, self._wrap = place, wrap

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, DeepsweError):
            if error.place is None:
                error.place = self._place
            return
        wrapped = self._wrap(f"{self._place}: {type(error).__name__}: {error}")
        wrapped.place = self._place
        raise wrapped from error


def boundary(place: str, wrap: type[DeepsweError]) -> AbstractContextManager[None]:
    """Attribute every failure inside the block to exactly one place.

    A `DeepsweError` passes through and keeps the innermost place; any other exception becomes `wrap`, with the
    original as its cause. Cancellation and interrupts pass untouched. This is the only broad handler of the package:
    callers then catch `DeepsweError` alone.

    Args:
        place: dotted name of the part, such as "sandbox.exec"; ends up in the record of a failed trajectory.
        wrap: the class that a foreign exception becomes.
    """
    return _Boundary(place, wrap)
