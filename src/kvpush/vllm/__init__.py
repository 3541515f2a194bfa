"""The out-of-tree KV connectors. The only package that imports vLLM.

vLLM finds the classes by name (entry point) or with `"kv_connector_module_path": "kvpush.vllm"`. They are imported when
they are asked for: the entry point is loaded in every process of vLLM, also in those that need no connector.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpush.vllm.connector import KVPushConnector

    NixlPushConnector = KVPushConnector

__all__ = ["KVPushConnector", "NixlPushConnector"]

# Some of vLLM's checks, and many deployments, go by the names of vLLM's own connectors.
_CLASSES = {"KVPushConnector": "KVPushConnector", "NixlPushConnector": "KVPushConnector"}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpush.vllm import connector

    return getattr(connector, _CLASSES[name])
