"""Which repositories evaluation benchmarks use, under which names. The lists are data, in `benchmarks.json`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("benchmarks.json")
EVALUATION_IMAGES = "swebench/sweb.eval.x86_64.{name}:latest"
"""How SWE-bench's published images are named, `__` of the id written as `_1776_`."""

_WRAPPED = re.compile(r"(?:swesmith/)(?P<owner>[^/]+?)__(?P<name>.+?)(?:\.[0-9a-f]{8})?$")
_FORK = re.compile(
    r"^(?:my|the|fork-of|fork|forked|mirror-of|mirror)[-_.]|[-_.](?:fork|forked|mirror|copy|dev|next|ng|v?\d+|main|clone|patched)$"
)


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """The lists.

    Attributes:
        repositories: benchmark -> names "owner/name" in lower case.
        aliases: another name of a repository ("owner/name", or a package's name alone) -> its name now.
        generic: bare names that many repositories have, so that the owner must agree, too.
    """

    repositories: Mapping[str, frozenset[str]]
    aliases: Mapping[str, str]
    generic: frozenset[str]


@functools.cache
def load_benchmarks() -> Benchmarks:
    """The shipped lists."""
    data = json.loads(DATA.read_bytes())
    repositories = {name: frozenset(repo.lower() for repo in repos) for name, repos in data["benchmarks"].items()}
    aliases = {alias: repo for repo, names in data["aliases"].items() for alias in names}
    return Benchmarks(repositories, aliases, frozenset(data["generic"]))


def canonical_repository(name: str) -> str:
    """One spelling, "owner/name" or "name" alone: lower case, no host or ".git", unwrapped, under the name of today."""
    plain = re.sub(r"^(?:https?://|git@)[^/:]+[/:]", "", name.strip().lower()).removesuffix(".git").strip("/")
    wrapped = _WRAPPED.fullmatch(plain)
    if wrapped:
        plain = f"{wrapped['owner']}/{wrapped['name']}"
    elif "/" not in plain and "__" in plain:
        plain = plain.replace("__", "/", 1)
    return load_benchmarks().aliases.get(plain, plain)


def bare_name(name: str) -> str:
    """The repository's name without its owner and without what forks are called by ("django-fork" is "django")."""
    bare = canonical_repository(name).rpartition("/")[2].replace("_", "-")
    shorter = _FORK.sub("", bare)
    return shorter or bare


def same_repository(name: str, listed: Collection[str]) -> tuple[str, str] | None:
    """Which repository of a list this one is, or may be a fork of.

    Args:
        name: in any spelling.
        listed: names, as `canonical_repository` gives them.

    Returns:
        (the listed name, "same" or "fork"); None if there is none. A repository of the same bare name counts as a fork
        unless that name is generic.
    """
    plain = canonical_repository(name)
    if plain in listed:
        return plain, "same"
    bare, generic = bare_name(plain), load_benchmarks().generic
    known_as = load_benchmarks().aliases.get(bare)
    for other in sorted(listed):
        if known_as == other or (bare_name(other) == bare and ("/" not in plain or bare not in generic)):
            return other, "fork" if "/" in plain else "same"
    return None


def is_evaluation_repository(name: str) -> bool:
    """Whether a benchmark of the shipped lists uses this very repository, under any of its names."""
    plain = canonical_repository(name)
    return any(plain in repos for repos in load_benchmarks().repositories.values())
