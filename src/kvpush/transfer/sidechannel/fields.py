"""Bounds of what may stand in a side channel message; msgspec checks them when it decodes."""

from __future__ import annotations

from typing import Annotated

import msgspec

RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=65536)]
Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Pid = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
