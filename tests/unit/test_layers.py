"""Imports point downwards only (docs/architecture.md, "Layers")."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "kvpush"

# Top to bottom. A package may import itself and what stands below it.
LAYERS = ["cli", "bench", "router", "launch", "vllm", "sim", "transfer", "transport", "plan", "protocol"]

# Third-party packages that a layer must stay free of, whatever it imports otherwise.
FORBIDDEN = {
    "protocol": {"torch", "vllm", "nixl", "aiohttp", "threading", "socket", "time", "asyncio"},
    "plan": {"torch", "vllm", "nixl", "aiohttp", "threading", "socket", "time", "asyncio"},
    "sim": {"torch", "vllm", "nixl", "aiohttp"},
    "transport": {"vllm", "aiohttp"},
    "transfer": {"vllm", "aiohttp"},
    "launch": {"torch", "nixl", "vllm"},
    "router": {"torch", "nixl", "vllm"},
    "bench": {"vllm"},
    "cli": {"vllm"},
}
# The router is deployable without the rest: it speaks HTTP and knows none of our other layers.
ROUTER_MAY_IMPORT = {"router"}


def imported_modules(path: Path) -> set[str]:
    """Absolute names of every module that a file imports at its top level or inside functions."""
    package = ["kvpush", *path.relative_to(SRC).parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                found.add(".".join([*base, node.module] if node.module else base))
            elif node.module:
                found.add(node.module)
                if node.module == "kvpush":
                    found |= {f"kvpush.{alias.name}" for alias in node.names}
    return found


def violations(layer: str, modules: set[str]) -> list[str]:
    rank = {name: place for place, name in enumerate(LAYERS)}
    bad = []
    for module in sorted(modules):
        parts = module.split(".")
        if parts[0] == "kvpush" and len(parts) > 1 and parts[1] in rank:
            target = parts[1]
            if rank[target] < rank[layer] or (layer == "router" and target not in ROUTER_MAY_IMPORT):
                bad.append(module)
        elif parts[0] in FORBIDDEN.get(layer, set()):
            bad.append(module)
    return bad


FILES = sorted(path for layer in LAYERS for path in (SRC / layer).rglob("*.py"))


@pytest.mark.unit
@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SRC)) for path in FILES])
def test_imports_point_downwards(path: Path) -> None:
    layer = path.relative_to(SRC).parts[0]
    assert violations(layer, imported_modules(path)) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("layer", "module"),
    [
        ("protocol", "kvpush.plan.runs"),
        ("protocol", "threading"),
        ("plan", "torch"),
        ("transport", "kvpush.transfer.worker"),
        ("router", "kvpush.protocol.ids"),
        ("transfer", "vllm.config"),
    ],
)
def test_an_upward_or_forbidden_import_is_found(layer: str, module: str) -> None:
    assert violations(layer, {module}) == [module]


@pytest.mark.unit
def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == set(LAYERS)
