"""What a mutation is: edits of byte ranges in one or more files. Applying one needs no parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepswe.errors import TaskError


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """One edit of one file.

    Attributes:
        file: path relative to the root of the repository.
        start, end: byte offsets in the UTF-8 file; what lies between is replaced.
        replacement: the new text.
        function: dotted name of the innermost function, such as "Table.insert".
        line: first line of the edit, from 1; 0 where it is not known.
        last_line: last line of the node that was mutated; 0 where it is not known.
    """

    file: str
    start: int
    end: int
    replacement: str
    function: str = ""
    line: int = 0
    last_line: int = 0


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug: one or more edits that belong together.

    Attributes:
        kind: name of the operator, a key of `deepswe.tasks.synth.operators.catalog.KINDS`.
        sites: the edits; within a file they do not overlap.
    """

    kind: str
    sites: tuple[Site, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it edits, in order."""
        return tuple(dict.fromkeys(site.file for site in self.sites))

    @property
    def functions(self) -> tuple[tuple[str, str], ...]:
        """(file, function) of each function that it edits, in order."""
        return tuple(dict.fromkeys((site.file, site.function) for site in self.sites))

    def apply(self, file: str, text: str) -> str:
        """One file with the bug.

        Raises:
            TaskError: a range lies outside the text, or two overlap.
        """
        return edited(text, [site for site in self.sites if site.file == file])


def edited(text: str, sites: Sequence[Site]) -> str:
    """A text with the edits of one file.

    Raises:
        TaskError: a range lies outside the text, or two overlap.
    """
    raw = text.encode()
    before: int | None = None
    for site in sorted(sites, reverse=True):
        if not 0 <= site.start <= site.end <= len(raw):
            raise TaskError(
                f"mutation of {site.file} at bytes {site.start}..{site.end} lies outside its {len(text.encode())} bytes"
            )
        if before is not None and site.end > before:
            raise TaskError(f"two edits of {site.file} overlap at byte {before}")
        raw = raw[: site.start] + site.replacement.encode() + raw[site.end :]
        before = site.start
    return raw.decode()


def is_sound(mutation: Mutation, texts: Mapping[str, str]) -> bool:
    """Whether every mutated file still compiles and is another text.

    Args:
        mutation: the bug.
        texts: path -> original text of at least the files that it edits.
    """
    try:
        changed = {file: mutation.apply(file, texts[file]) for file in mutation.files}
        for file, text in changed.items():
            compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, TaskError):
        return False
    return all(text != texts[file] for file, text in changed.items())
