"""The copy kernel without a GPU: what it does, in Triton's interpreter, and that it compiles to wide loads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from packing_layouts import LAYOUTS

pytestmark = pytest.mark.unit

pytest.importorskip("triton")
HERE = Path(__file__).parent
PATH = os.pathsep.join(str(HERE.parents[2] / part) for part in ("src", "tests"))


def run(script: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], capture_output=True, text=True, timeout=560,
        env={**os.environ, "PYTHONPATH": PATH, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.mark.timeout(580)
def test_the_kernel_agrees_with_the_naive_twin() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert run("packing_interpreted.py", str(seed), TRITON_INTERPRET="1") == str(2 * len(LAYOUTS))


@pytest.mark.timeout(580)
def test_every_byte_moves_in_loads_and_stores_of_16(tmp_path: Path) -> None:
    wide, single = run("packing_compiled.py", TRITON_CACHE_DIR=str(tmp_path)).split()
    assert int(wide) == 5 * 2 * 8, "32 KiB of 256 threads are eight loads and eight stores of each thread"
    assert int(single) == 0
