"""Objects with resource versions, selectors, and a history that watches read: what etcd and the watch cache do."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
HISTORY = 20_000


class Refused(Exception):
    """An answer that is a Status."""

    def __init__(self, code: int, reason: str, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after


@dataclass(frozen=True)
class Kind:
    """One resource of the API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


@dataclass
class Change:
    version: int
    type: str
    object: Object
    line: bytes


@dataclass
class Shelf:
    """All objects of one kind."""

    kind: Kind
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=lambda: deque(maxlen=HISTORY))
    news: asyncio.Event = field(default_factory=asyncio.Event)
    forgotten: int = 0


class Store:
    def __init__(self) -> None:
        self.version = 1
        self.shelves: dict[Kind, Shelf] = {}

    def shelf(self, kind: Kind) -> Shelf:
        return self.shelves.setdefault(kind, Shelf(kind))

    def create(self, kind: Kind, namespace: str, made: Object) -> Object:
        metadata = made.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        name = metadata.get("name")
        if not name:
            raise Refused(422, "Invalid", f"{kind.kind} is invalid: metadata.name: Required value")
        key = (namespace, name)
        if key in self.shelf(kind).objects:
            raise Refused(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
        made |= {"apiVersion": kind.api_version, "kind": kind.kind}
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp(), "generation": 1}
        if kind.namespaced:
            metadata["namespace"] = namespace
        self.shelf(kind).objects[key] = made
        self.tell(kind, "ADDED", made)
        return made

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        try:
            return self.shelf(kind).objects[(namespace, name)]
        except KeyError:
            raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found') from None

    def change(self, kind: Kind, namespace: str, name: str, edit: Callable[[Object], None]) -> Object:
        """Replace an object by an edited copy. Two levels are copied: `edit` replaces what lies deeper."""
        found = dict(self.get(kind, namespace, name))
        for part in ("metadata", "spec", "status"):
            if part in found:
                found[part] = dict(found[part])
        edit(found)
        self.shelf(kind).objects[(namespace, name)] = found
        self.tell(kind, "MODIFIED", found)
        return found

    def remove(self, kind: Kind, namespace: str, name: str) -> Object:
        found = dict(self.get(kind, namespace, name))
        found["metadata"] = dict(found["metadata"])
        del self.shelf(kind).objects[(namespace, name)]
        self.tell(kind, "DELETED", found)
        return found

    def tell(self, kind: Kind, change: str, made: Object) -> None:
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        shelf = self.shelf(kind)
        if len(shelf.history) == HISTORY:
            shelf.forgotten = shelf.history[0].version
        line = json.dumps({"type": change, "object": made}).encode() + b"\n"
        shelf.history.append(Change(self.version, change, made, line))
        shelf.news.set()
        shelf.news = asyncio.Event()

    def forget(self, kind: Kind) -> None:
        """Compact: watches from before now get 410."""
        self.shelf(kind).forgotten = self.version
        self.version += 1


def stamp(ahead: float = 0.0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + ahead))


def selected(made: Object, namespace: str, query: Mapping[str, str]) -> bool:
    """Namespace, labelSelector and the fieldSelectors that clients use."""
    metadata = made["metadata"]
    if namespace and metadata.get("namespace") != namespace:
        return False
    labels = metadata.get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        name, differs, value = term.replace("==", "=").partition("!=")
        if differs:
            if labels.get(name) == value:
                return False
            continue
        name, equals, value = name.partition("=")
        if name.startswith("!"):
            if name[1:] in labels:
                return False
        elif name not in labels or (equals and labels[name] != value):
            return False
    fields = {"metadata.name": metadata["name"], "metadata.namespace": metadata.get("namespace", "")}
    fields["status.phase"] = made.get("status", {}).get("phase", "")
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = term.replace("==", "=").partition("=")
        if fields.get(name) != value:
            return False
    return True


def merge(target: Object, patch: Object) -> None:
    """RFC 7386; nested objects are replaced, not edited."""
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict):
            target[name] = dict(target[name])
            merge(target[name], value)
        else:
            target[name] = value
