"""Requests to a Kubernetes API server: plain JSON, a budget, new tries, counts.

`kubernetes-asyncio` finds the cluster and the credentials (kubeconfig, exec plugins, a pod's own account, their
refresh); requests, watches and websockets are aiohttp's own. Its generated models are left out because reading one
event into them takes some 15 times as long as reading its JSON (`benchmarks/kubernetes.py` measures both), which a
watch over thousands of pods would take from the event loop; its websocket client because it speaks v4 only and reads
all output as UTF-8, which frames are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import ssl
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError
from kubernetes_asyncio import config as cluster_config
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException

from deepswe.config import KubernetesConfig
from deepswe.errors import SandboxError, SandboxUnavailable

RETRIED = (409, 429, 500, 502, 503, 504)
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 20.0
READ_BUFFER = 1 << 21
"""One event of a watch is one line; etcd allows objects of 1.5 MiB."""
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")


class ApiError(SandboxError):
    """The API server answered with an error, or (status 0) could not be reached."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        """Say what was asked and what came back.

        Args:
            what: method and path.
            status: of HTTP; 0 for a connection that failed.
            reason: Kubernetes' word, such as AlreadyExists.
            message: for a reader.
            retry_after_s: pause that the server asks for; 0 for none.
        """
        super().__init__(f"{what}: {status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 0 or (self.status in RETRIED and self.reason != "AlreadyExists")


class Budget:
    """At most `rate` uses per second, twice as many at once after a pause; first come, first served."""

    def __init__(self, rate: float) -> None:
        """Start full."""
        self._rate = rate
        self._size = max(1.0, 2 * rate)
        self._left = self._size
        self._seen = time.monotonic()
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for one use."""
        async with self._turn:
            while True:
                now = time.monotonic()
                self._left = min(self._size, self._left + (now - self._seen) * self._rate)
                self._seen = now
                if self._left >= 1:
                    self._left -= 1
                    return
                await asyncio.sleep((1 - self._left) / self._rate)


def pause_s(attempt: int, asked_s: float = 0.0) -> float:
    """How long to wait before a new try: twice as long each time, anywhere in the upper half, at least as asked."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt)
    return asked_s * random.uniform(1.0, 1.25) + longest * random.uniform(0.5, 1.0)


async def find_cluster(config: KubernetesConfig) -> Configuration:
    """Address and credentials: the file that the recipe names, else KUBECONFIG or ~/.kube/config, else the pod's own.

    Raises:
        SandboxUnavailable: there are none.
    """
    found = Configuration()
    source = _kubeconfig(config)
    try:
        if source:
            await cluster_config.load_kube_config(source, config.context or None, found, persist_config=False)
        else:
            cluster_config.load_incluster_config(found)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        place = source or "~/.kube/config or a pod's service account"
        raise SandboxUnavailable(
            f"no Kubernetes cluster in {place}: {error}; set sandbox.kubernetes.kubeconfig or KUBECONFIG"
        ) from error
    return found


def _kubeconfig(config: KubernetesConfig) -> str:
    """The file with the cluster's address; empty if there is none."""
    if config.kubeconfig:
        return os.path.expanduser(config.kubeconfig)
    default = os.path.expanduser("~/.kube/config")
    return os.environ.get("KUBECONFIG", "") or (default if os.path.exists(default) else "")


def _proxy(found: Configuration) -> str | None:
    """The proxy on the way to the cluster: the kubeconfig's, else the environment's. Asked once; aiohttp's own way of
    asking the environment costs a thread a request."""
    if found.proxy:
        return str(found.proxy)
    host = urllib.parse.urlsplit(str(found.host))
    if not host.hostname or urllib.request.proxy_bypass(host.hostname):
        return None
    return urllib.request.getproxies().get(host.scheme)


def _staying() -> aiohttp.TraceConfig:
    """Follow no redirect, which would give what is asked to another place; websockets have no setting for that."""

    async def refuse(session: Any, context: Any, told: aiohttp.TraceRequestRedirectParams) -> None:
        place = told.response.headers.get("Location", "")[:300]
        words = f"it sends to {place!r}, which is not followed; name the server that answers itself in the kubeconfig"
        raise ApiError(f"{told.method} {told.url.path}", told.response.status, "Redirect", words)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace


def _trust(found: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=found.ssl_ca_cert)
    if found.cert_file:
        context.load_cert_chain(found.cert_file, keyfile=found.key_file)
    if not found.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        # Clusters sign with authorities of their own making, many of which lack what the strict check asks for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


class Client:
    """One API server, on one event loop. Counts what it asks for in `counts`: verb -> requests that were sent."""

    def __init__(self, config: KubernetesConfig, found: Configuration) -> None:
        """Prepare; nothing is sent yet."""
        self.config = config
        self.counts: Counter[str] = Counter()
        self._found = found
        self._writes = Budget(config.writes_per_s)
        self._reads = Budget(config.reads_per_s)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=_trust(found), limit=0),
            read_bufsize=READ_BUFFER,
            trace_configs=[_staying()],
        )
        self._proxy = _proxy(found)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    @property
    def pods(self) -> str:
        """The path of the namespace's pods."""
        return f"/api/v1/namespaces/{self.config.namespace}/pods"

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        tries: int | None = None,
    ) -> dict[str, Any]:
        """One request within the budget, tried again with growing pauses while its failure may pass.

        Args:
            method: GET, POST, PUT, DELETE or PATCH (a merge patch).
            path: from the root of the server.
            query: parameters.
            body: JSON.
            tries: at most so many; the configured number if None.

        Raises:
            ApiError: the last answer.
        """
        most = self.config.retries + 1 if tries is None else tries
        attempt = 0
        while True:
            attempt += 1
            await (self._reads if method == "GET" else self._writes).take()
            self.counts[method] += 1
            try:
                return await self._once(method, path, query, body)
            except ApiError as error:
                if not error.passing or attempt >= most:
                    raise
                pause = pause_s(attempt - 1, error.retry_after_s)
            await asyncio.sleep(pause)

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        limit = aiohttp.ClientTimeout(total=self.config.request_timeout_s)
        what = f"{method} {path}"
        try:
            headers = {"Content-Type": kind, **await self._credentials()}
            async with self._http.request(
                method, self._url(path), params=query, data=data, headers=headers, timeout=limit, proxy=self._proxy
            ) as answer:
                text = await answer.text()
                if answer.status >= 400:
                    raise _refusal(what, answer.status, answer.headers, text)
                made: dict[str, Any] = json.loads(text)
                return made
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ApiError(what, 0, type(error).__name__, str(error) or "no answer in time") from error

    async def rest(self, attempt: int, error: ApiError) -> None:
        """Wait before a new try of what failed.

        Args:
            attempt: how many came before the one that failed.
            error: how it failed.
        """
        await asyncio.sleep(pause_s(attempt, error.retry_after_s))

    async def lines(self, path: str, query: Mapping[str, str], idle_s: float) -> AsyncIterator[bytes]:
        """The lines of an answer that goes on, such as a watch.

        Args:
            path: from the root of the server.
            query: parameters.
            idle_s: end with an error when nothing came for so long.

        Raises:
            ApiError: it could not be opened, or broke off.
        """
        await self._reads.take()
        self.counts["WATCH"] += 1
        what = f"WATCH {path}"
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self.config.request_timeout_s, sock_read=idle_s)
        try:
            headers = await self._credentials()
            async with self._http.get(
                self._url(path), params=query, headers=headers, timeout=limit, proxy=self._proxy
            ) as answer:
                if answer.status >= 400:
                    raise _refusal(what, answer.status, answer.headers, await answer.text())
                async for line in answer.content:
                    yield line
        except (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError, ValueError) as error:
            raise ApiError(what, 0, type(error).__name__, str(error) or "nothing came in time") from error

    async def enter(self, pod: str, container: str, command: Sequence[str]) -> aiohttp.ClientWebSocketResponse:
        """Start a command in a pod, with its input, output and errors on one websocket. Tried once.

        Raises:
            ApiError: the server refused it, or could not be reached.
        """
        await self._reads.take()
        self.counts["EXEC"] += 1
        path = f"{self.pods}/{pod}/exec"
        what = f"EXEC {path}"
        query = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in command]
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await self._http.ws_connect(
                    self._url(path),
                    params=query,
                    headers=await self._credentials(),
                    protocols=PROTOCOLS,
                    heartbeat=self.config.heartbeat_s,
                    max_msg_size=0,
                    autoping=True,
                    proxy=self._proxy,
                )
        except aiohttp.WSServerHandshakeError as error:
            words = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound"}
            asked = error.headers.get("Retry-After", "") if error.headers is not None else ""
            wait = float(asked) if asked.isdigit() else 0.0
            raise ApiError(what, error.status, words.get(error.status, "Refused"), error.message, wait) from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ApiError(what, 0, type(error).__name__, str(error) or "no answer in time") from error

    async def _credentials(self) -> dict[str, str]:
        """Headers; asking for the token renews it when it is due."""
        token = await self._found.get_api_key_with_prefix("BearerToken")
        if token:
            return {"Authorization": str(token)}
        if self._found.username:
            return {"Authorization": aiohttp.BasicAuth(self._found.username, self._found.password or "").encode()}
        return {}

    def _url(self, path: str) -> str:
        return str(self._found.host).rstrip("/") + path


def _refusal(what: str, status: int, headers: Mapping[str, str], text: str) -> ApiError:
    reason, message = "", text.strip()[:500]
    wait = headers.get("Retry-After", "")
    with contextlib.suppress(ValueError, AttributeError):
        told = json.loads(text)
        reason, message = told.get("reason", ""), told.get("message", message)
    return ApiError(what, status, reason, message, float(wait) if wait.isdigit() else 0.0)
