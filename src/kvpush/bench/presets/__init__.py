"""Named set-ups of the serving benchmark: a TOML file each, whose keys are the options of `kvpush bench serve`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any


def names() -> list[str]:
    """The presets of the package."""
    folder = resources.files(__name__)
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read(name: str, known: Mapping[str, type]) -> dict[str, Any]:
    """The options of a preset, or of a TOML file of one's own; lists are joined with commas, as on the command line.

    known: option (with underscores) -> type. Raises ValueError naming the preset and the key that is wrong.
    """
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text()
        elif name in names():
            text = resources.files(__name__).joinpath(f"{name}.toml").read_text()
        else:
            raise ValueError(
                f"there is no preset {name!r}; there are {', '.join(names())}, or a file of yours in .toml"
            )
        found = tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"preset {name}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"preset {name}: {error}") from None
    return {key: _checked(name, key, value, known) for key, value in found.items()}


def _checked(name: str, key: str, value: Any, known: Mapping[str, type]) -> Any:
    if key not in known:
        raise ValueError(f"preset {name}: unknown key {key!r}; known: {', '.join(sorted(known))}")
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    wanted = known[key]
    if wanted is Path and isinstance(value, str):
        return Path(value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"preset {name}: {key} must be {wanted.__name__}, not {value!r}")
    return value
