"""The other process of the peer tests: a cache that is exported, and copies of its memory on request.

Arguments: layout, number of blocks. Speaks JSON lines: one with what it exports, then one for each line that it reads
(a path, to which it writes its memory as .npz; an empty line or the end ends it).
"""

import base64
import json
import sys

import msgspec
import numpy as np
import torch

from kvpush.transfer.packing.base import PeerUnavailable
from kvpush.transfer.packing.peer import export_regions
from kvpush.transport.base import Region
from packing_layouts import LAYOUTS, geometry_of


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    layout, num_blocks = LAYOUTS[sys.argv[1]], int(sys.argv[2])
    heads = 1 if "h" not in layout.order else 4
    layers = layout.layers(3, num_blocks, heads, 16, 64, torch.bfloat16, 0)
    torch.cuda.synchronize()
    geometry = geometry_of(layers)
    storages = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in layers}
    expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    try:
        regions = export_regions([Region(address, length, 0) for address, length in geometry.regions(storages)])
    except PeerUnavailable as error:
        say(unavailable=error.reason, expandable=expandable)
        return
    packed = base64.b64encode(msgspec.msgpack.encode((geometry, regions))).decode()
    say(exported=packed, expandable=expandable)
    for line in sys.stdin:
        if not line.strip():
            break
        torch.cuda.synchronize()
        memory = {}
        for layer in layers:
            storage = layer.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=layer.device).set_(storage)
            memory[str(storage.data_ptr())] = whole.cpu().numpy()
        np.savez(line.strip(), **memory)
        say(written=line.strip())


if __name__ == "__main__":
    main()
