"""Removes one guard after another from a copy of the source and lets the simulator find out (docs/simulator.md).

Each mutation replaces a piece of text that occurs exactly once. A mutant that survives means that the simulator does
not see what the guard is for.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """worlds: how many it took to find the mutant, None if it survived. rule: what it broke."""

    worlds: int | None
    rule: str


def apply(mutation: Mutation, src: Path) -> None:
    """Raises ValueError if the text is not there exactly once."""
    path = src / "kvpush" / mutation.path
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.path}: the text of {mutation.name!r} is there {count} times")
    path.write_text(text.replace(mutation.old, mutation.new))


def hunt(mutation: Mutation, worlds: int, jobs: int, first: int) -> Verdict:
    """Runs worlds on the mutated source until one breaks a rule."""
    with tempfile.TemporaryDirectory(prefix="kvpush-mutant-") as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutation, src)
        command = [sys.executable, str(ROOT / "scripts" / "sim.py"), "--stop", "--worlds", str(worlds)]
        command += ["--jobs", str(jobs), "--first", str(first)]
        done = subprocess.run(
            command, env=os.environ | {"KVPUSH_SRC": str(src), "PYTHONPATH": str(src)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    found = re.search(r"^world (\d+): (.*)$", done.stdout, re.MULTILINE)
    if found:
        return Verdict(int(found[1]) - first + 1, found[2])
    if done.returncode:
        raise RuntimeError(f"the simulator failed on {mutation.name!r}: {done.stderr[-2000:]}")
    return Verdict(None, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=10_000, help="worlds for each mutant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", default="", help="only mutations whose name contains this")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if not chosen:
        parser.error(f"no mutation has {options.only!r} in its name")
    start_s, survived = time.monotonic(), 0
    print(f"{'mutation':<58} {'worlds':>7}  what it broke")
    for mutation in chosen:
        verdict = hunt(mutation, options.worlds, options.jobs, options.first)
        survived += verdict.worlds is None
        worlds = "-" if verdict.worlds is None else str(verdict.worlds)
        print(f"{mutation.name:<58} {worlds:>7}  {verdict.rule[:120] or 'SURVIVED'}", flush=True)
    found, took_s = len(chosen) - survived, time.monotonic() - start_s
    print(f"{found} of {len(chosen)} mutants found in {took_s:.0f} s")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
