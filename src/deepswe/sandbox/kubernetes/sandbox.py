"""A live pod as a sandbox: the calls of the protocol, each one round trip of its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepswe.sandbox.base import SandboxSpec
from deepswe.sandbox.kubernetes.pods import HOME
from deepswe.sandbox.kubernetes.session import Session
from deepswe.sandbox.served import Answer, ServedSandbox

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLUSTER = ("KUBERNETES_", "HOSTNAME", "LC_CTYPE")
"""Variables that the cluster, or the interpreter of process 1, adds and no command needs."""


class PodSandbox(ServedSandbox):
    """One live pod; see `deepswe.sandbox.base.Sandbox`. Made by `SandboxPool.open`."""

    def __init__(self, name: str, spec: SandboxSpec, enforced: Mapping[str, str], session: Session) -> None:
        """Describe a pod with an open session.

        Args:
            name: the pod's.
            spec: what was asked for.
            enforced: limit -> how.
            session: open.
        """
        super().__init__(name, spec, environment(spec, session.image_environment))
        self.enforced = enforced
        self._session = session

    @property
    def sessions_opened(self) -> int:
        """How often the session was opened: 1 unless it broke."""
        return self._session.opened

    async def _call(self, kind: int, fields: Sequence[bytes], timeout_s: float) -> Answer:
        return await self._session.call(kind, fields, timeout_s)


def environment(spec: SandboxSpec, image: Mapping[str, str]) -> dict[str, str]:
    """What every command sees: a small default, over it the image's own variables, over these the spec's."""
    default = {
        "PATH": PATH,
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    own = {name: value for name, value in image.items() if not name.startswith(_CLUSTER) and name != "HOME"}
    return {**default, **own, **spec.env}
