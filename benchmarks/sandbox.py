"""What a sandbox costs: start, command and end, against bare bubblewrap and `docker run`; 64 and 512 alive at once.

Prints one JSON object as its last line; exits 0 only where the targets hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from deepswe.cli.progress import TerminalProgress
from deepswe.sandbox.bench import measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    quick = parser.parse_args().quick
    with TerminalProgress() as progress:
        figures = measure(progress, samples=20 if quick else 200, few=16 if quick else 64, many=64 if quick else 512)
    missed = figures.missed()
    print(json.dumps({**asdict(figures), "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
