"""The transfer layer is imported by processes that need neither torch nor triton: the simulator, the scheduler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SRC = Path(__file__).parents[3] / "src"
TRANSFER = SRC / "kvpush" / "transfer"
# What is a part of torch's world itself; only the factory and open_peer import these, when they are called.
WITH_TORCH = {
    "buffer", "layers", "host_packer", "torch_packer", "triton_packer", "block_ids", "copy_kernel", "kernels",
    "peer_kernel", "streams",
}  # fmt: skip
FREE = [path for path in sorted(TRANSFER.rglob("*.py")) if path.parent.name != "packing" or path.stem not in WITH_TORCH]


def loaded(modules: list[str]) -> str:
    code = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'triton', 'vllm') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env={"PYTHONPATH": str(SRC)},
    )
    return done.stdout.strip()


@pytest.mark.timeout(300)
def test_nothing_else_of_the_transfer_layer_imports_torch() -> None:
    names = []
    for path in FREE:
        parts = path.relative_to(SRC).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert "kvpush.transfer.packing.factory" in names
    assert loaded(names) == "[]"
