"""The HTTP side: discovery, objects, watches, exec, and what goes wrong between."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from aiohttp import web

from tests.kubernetes_server.channels import Channels
from tests.kubernetes_server.faults import KINDS, Faults
from tests.kubernetes_server.kubelet import POD, Kubelet
from tests.kubernetes_server.store import Kind, Object, Refused, Store, merge, selected, stamp

NAMESPACE = Kind("", "v1", "namespaces", "Namespace", False, ("ns",))
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")
KINDS_SERVED = (
    POD,
    NAMESPACE,
    LEASE,
    Kind("", "v1", "configmaps", "ConfigMap", short=("cm",)),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "serviceaccounts", "ServiceAccount", short=("sa",)),
    Kind("", "v1", "resourcequotas", "ResourceQuota", short=("quota",)),
    Kind("", "v1", "limitranges", "LimitRange"),
    Kind("", "v1", "nodes", "Node", False),
    Kind("apps", "v1", "daemonsets", "DaemonSet", short=("ds",)),
    Kind("apps", "v1", "deployments", "Deployment"),
    Kind("batch", "v1", "cronjobs", "CronJob", short=("cj",)),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", short=("netpol",)),
    Kind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False),
    Kind("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False, ("pc",)),
)
WARM = (
    Kind("extensions.agents.x-k8s.io", "v1beta1", "sandboxwarmpools", "SandboxWarmPool"),
    Kind("extensions.agents.x-k8s.io", "v1beta1", "sandboxtemplates", "SandboxTemplate"),
    Kind("extensions.agents.x-k8s.io", "v1beta1", "sandboxclaims", "SandboxClaim"),
    Kind("agents.x-k8s.io", "v1beta1", "sandboxes", "Sandbox"),
)
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
BOOKMARK_S = 1.0
CLAIM, TEMPLATE, POOL, SANDBOX = WARM[2], WARM[1], WARM[0], WARM[3]


def status_of(code: int, reason: str, message: str) -> Object:
    made = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "message": message, "reason": reason, "code": code}
    return made | {"status": "Success" if code < 400 else "Failure"}


def bookmark(kind: Kind, version: int, annotations: dict[str, str]) -> bytes:
    metadata = {"resourceVersion": str(version), "annotations": annotations}
    made = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
    return json.dumps({"type": "BOOKMARK", "object": made}).encode() + b"\n"


class Server:
    """The whole cluster.

    Args:
        faults: what goes wrong.
        simulate: pods are simulated.
        token: bearer token that requests must carry; none if empty.
        warm: agent-sandbox is installed.
    """

    def __init__(self, faults: Faults, simulate: bool, token: str = "", warm: bool = False) -> None:
        self.store = Store()
        self.faults = faults
        self.token = token
        self.kubelet = Kubelet(self.store, faults, simulate)
        self.counts: Counter[str] = Counter()
        self.warm = warm
        self.kinds = KINDS_SERVED + (WARM if warm else ())
        self.claims: set[asyncio.Task[None]] = set()
        for name in ("default", "deepswe"):
            self.store.create(NAMESPACE, "", {"metadata": {"name": name}, "status": {"phase": "Active"}})

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard], client_max_size=8 << 20)
        app.router.add_get("/version", self.get_version)
        app.router.add_get("/api", self.get_core)
        app.router.add_get("/apis", self.get_groups)
        app.router.add_get("/test/figures", self.get_figures)
        app.router.add_post("/test/faults", self.set_faults)
        app.router.add_post("/test/forget", self.forget)
        for root in ("/api/{version}", "/apis/{group}/{version}"):
            app.router.add_get(root, self.get_resources)
            app.router.add_route("*", root + "/namespaces/{namespace}/{plural}/{name}/exec", self.exec)
            for middle in ("/namespaces/{namespace}", ""):
                app.router.add_route("*", root + middle + "/{plural}/{name}", self.one)
                app.router.add_route("*", root + middle + "/{plural}", self.many)
        return app

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if request.path.startswith("/test/"):
                return await handler(request)
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if not request.path.endswith("/exec"):
                self.counts[f"{request.method} {request.path.split('/')[-1] if request.method == 'POST' else ''}"] += 1
                reset = self.misfortune(request)
                answer = await handler(request)
                if reset:
                    self.cut(request)
                return answer
            return await handler(request)
        except Refused as refused:
            headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
            body = status_of(refused.code, refused.reason, refused.message)
            return web.json_response(body, status=refused.code, headers=headers)

    def misfortune(self, request: web.Request) -> bool:
        """Refuse a request now and then; True if its answer is to be lost."""
        if request.query.get("watch"):
            return False
        if self.faults.strikes("http_429"):
            raise Refused(429, "TooManyRequests", "too many requests, please try again later", 1)
        if self.faults.strikes("http_503"):
            raise Refused(503, "ServiceUnavailable", "the server is currently unable to handle the request", 1)
        if self.faults.strikes("http_500"):
            raise Refused(500, "InternalError", "etcdserver: request timed out")
        if self.faults.strikes("reset"):
            if self.faults.random.random() < 0.5:
                self.cut(request)
            return True
        return False

    def cut(self, request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError

    # Discovery.

    async def get_version(self, request: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "36", "gitVersion": "v1.36.2", "platform": "linux/amd64"})

    async def get_core(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})

    async def get_groups(self, request: web.Request) -> web.Response:
        groups = {kind.group: kind.version for kind in self.kinds if kind.group}
        made = []
        for group, version in groups.items():
            entry = {"groupVersion": f"{group}/{version}", "version": version}
            made.append({"name": group, "versions": [entry], "preferredVersion": entry})
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": made})

    async def get_resources(self, request: web.Request) -> web.Response:
        group, version = request.match_info.get("group", ""), request.match_info["version"]
        found = [kind for kind in self.kinds if (kind.group, kind.version) == (group, version)]
        if not found:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        made = [
            {
                "name": kind.plural,
                "singularName": kind.kind.lower(),
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": VERBS,
                "shortNames": list(kind.short),
            }
            for kind in found
        ]
        if group == "":
            made.append({"name": "pods/exec", "singularName": "", "namespaced": True, "kind": "PodExecOptions",
                         "verbs": ["create", "get"]})  # fmt: skip
        version_name = f"{group}/{version}" if group else version
        return web.json_response(
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version_name, "resources": made}
        )

    def kind_of(self, request: web.Request) -> Kind:
        wanted = (request.match_info.get("group", ""), request.match_info["version"], request.match_info["plural"])
        for kind in self.kinds:
            if (kind.group, kind.version, kind.plural) == wanted:
                return kind
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    # Objects.

    async def many(self, request: web.Request) -> web.StreamResponse:
        kind, namespace = self.kind_of(request), request.match_info.get("namespace", "")
        if request.method == "POST":
            made = await request.json()
            if kind.namespaced and ("", namespace) not in self.store.shelf(NAMESPACE).objects:
                raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
            return web.json_response(self.created(kind, namespace, made), status=201)
        if request.method == "DELETE":
            for (space, name), found in list(self.store.shelf(kind).objects.items()):
                if selected(found, namespace, request.query):
                    self.removed(kind, space, name, 0)
            return web.json_response(status_of(200, "", ""))
        if request.query.get("watch") in ("true", "1"):
            return await self.watch(request, kind, namespace)
        return web.json_response(self.listed(request, kind, namespace))

    def created(self, kind: Kind, namespace: str, made: Object) -> Object:
        if kind is POD:
            made.setdefault("status", {"phase": "Pending", "qosClass": "Burstable"})
        found = self.store.create(kind, namespace, made)
        if kind is POD:
            self.kubelet.take(found)
        elif kind == CLAIM and self.warm:
            self.claims.add(asyncio.create_task(self.bind(namespace, found)))
        return found

    async def bind(self, namespace: str, claim: Object) -> None:
        """What agent-sandbox does with a claim: a Sandbox and its pod, from the pool's template."""
        name = claim["metadata"]["name"]
        pool = self.store.get(POOL, namespace, claim["spec"]["warmPoolRef"]["name"])
        template = self.store.get(TEMPLATE, namespace, pool["spec"]["sandboxTemplateRef"]["name"])
        parent = [{"apiVersion": SANDBOX.api_version, "kind": "Sandbox", "name": f"{name}-warm", "uid": "x"}]
        extra = claim["spec"].get("additionalPodMetadata", {})
        pod = {"metadata": {"name": f"{name}-pod", "ownerReferences": parent, "labels": extra.get("labels", {})}}
        pod["spec"] = json.loads(json.dumps(template["spec"]["podTemplate"]["spec"]))
        sandbox = {"metadata": {"name": f"{name}-warm", "annotations": {"agents.x-k8s.io/pod-name": f"{name}-pod"}}}
        self.created(SANDBOX, namespace, sandbox)
        self.created(POD, namespace, pod)
        await asyncio.sleep(0.3)
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": stamp()}
        status = {"sandbox": {"name": f"{name}-warm"}, "conditions": [ready]}
        with suppress(Refused):
            self.store.change(CLAIM, namespace, name, lambda found: found.update(status=status))

    def removed(self, kind: Kind, namespace: str, name: str, grace_s: float) -> Object:
        if kind is POD:
            return self.kubelet.delete((namespace, name), grace_s)
        if kind == CLAIM and self.warm:
            for other, suffix in ((SANDBOX, "-warm"), (POD, "-pod")):
                with suppress(Refused):
                    self.removed(other, namespace, name + suffix, 1)
        return self.store.remove(kind, namespace, name)

    def listed(self, request: web.Request, kind: Kind, namespace: str) -> Object:
        found = [item for item in self.store.shelf(kind).objects.values() if selected(item, namespace, request.query)]
        start = int(request.query.get("continue") or 0)
        most = int(request.query.get("limit") or 0) or len(found)
        metadata = {"resourceVersion": str(self.store.version)}
        if start + most < len(found):
            metadata["continue"] = str(start + most)
        items = found[start : start + most]
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}

    async def one(self, request: web.Request) -> web.StreamResponse:
        kind, namespace = self.kind_of(request), request.match_info.get("namespace", "")
        name = request.match_info["name"]
        if request.method == "GET":
            return web.json_response(self.store.get(kind, namespace, name))
        if request.method == "DELETE":
            options = await request.json() if request.can_read_body else {}
            grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
            if grace is None:
                grace = self.store.get(kind, namespace, name).get("spec", {}).get("terminationGracePeriodSeconds", 30)
            return web.json_response(self.removed(kind, namespace, name, float(grace)))
        body = await request.json()
        if request.method == "PATCH":
            return web.json_response(self.store.change(kind, namespace, name, lambda found: merge(found, body)))
        if request.method == "PUT":
            return web.json_response(self.store.change(kind, namespace, name, lambda found: found.update(body)))
        raise Refused(405, "MethodNotAllowed", request.method)

    # Watches.

    async def watch(self, request: web.Request, kind: Kind, namespace: str) -> web.StreamResponse:
        shelf = self.store.shelf(kind)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        version = request.query.get("resourceVersion", "")
        at = int(version) if version not in ("", "0") else 0
        end = time.monotonic() + float(request.query.get("timeoutSeconds") or 1800)
        if not at or request.query.get("sendInitialEvents") == "true":
            at = self.store.version
            for found in list(shelf.objects.values()):
                if selected(found, namespace, request.query):
                    await response.write(json.dumps({"type": "ADDED", "object": found}).encode() + b"\n")
        if request.query.get("sendInitialEvents") == "true":
            await response.write(bookmark(kind, at, {"k8s.io/initial-events-end": "true"}))
        bookmarked = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < end:
                if at < shelf.forgotten:
                    gone = status_of(410, "Expired", f"too old resource version: {at} ({self.store.version})")
                    await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                    break
                news = shelf.news
                lines = []
                for change in reversed(shelf.history):
                    if change.version <= at:
                        break
                    if selected(change.object, namespace, request.query):
                        lines.append(change.line)
                at = max(at, self.store.version)
                if lines:
                    await response.write(b"".join(reversed(lines)))
                if time.monotonic() - bookmarked > BOOKMARK_S:
                    bookmarked = time.monotonic()
                    if request.query.get("allowWatchBookmarks"):
                        await response.write(bookmark(kind, at, {}))
                    if self.faults.strikes("watch_410"):
                        self.store.forget(kind)
                        continue
                    if self.faults.strikes("watch_reset"):
                        request.transport.abort() if request.transport else None
                        break
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), BOOKMARK_S / 4)
                await asyncio.sleep(0.01)
        return response

    # Commands.

    async def exec(self, request: web.Request) -> web.StreamResponse:
        self.counts["exec"] += 1
        if self.faults.strikes("exec_refused"):
            raise Refused(500, "InternalError", "error dialing backend: connection refused")
        key = (request.match_info["namespace"], request.match_info["name"])
        channels = Channels(request, lambda: self.faults.strikes("exec_lost"))
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise Refused(400, "BadRequest", "Upgrade request required")
        await self.kubelet.exec(channels, key, request.query, request.query.getall("command", []))
        return channels.socket

    # For tests.

    async def get_figures(self, request: web.Request) -> web.Response:
        pods = self.store.shelf(POD).objects
        made = {
            "counts": self.counts,
            "faults": self.faults.counts,
            "pods": len(pods),
            "names": [name for _, name in pods][:50],
            "leases": len(self.store.shelf(LEASE).objects),
            "containers": len(self.kubelet.containers),
            "started": self.kubelet.started,
            "most": self.kubelet.most,
        }
        return web.json_response(made)

    async def set_faults(self, request: web.Request) -> web.Response:
        for kind, rate in (await request.json()).items():
            assert kind in KINDS
            setattr(self.faults, kind, rate)
        return web.json_response({})

    async def forget(self, request: web.Request) -> web.Response:
        self.store.forget(POD)
        return web.json_response({})

    async def close(self) -> None:
        for task in self.claims:
            task.cancel()
        await self.kubelet.close()
