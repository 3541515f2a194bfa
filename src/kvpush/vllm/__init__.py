"""The out-of-tree KV connectors. The only package that imports vLLM.

vLLM finds the classes by name (entry point) or with `"kv_connector_module_path": "kvpush.vllm"`.
"""

from kvpush.vllm.connector import KVPushConnector

# Some of vLLM's checks and many deployments go by the names of vLLM's own connectors.
NixlPushConnector = KVPushConnector

__all__ = ["KVPushConnector", "NixlPushConnector"]
