"""Entry point for `vllm.general_plugins`: makes the connectors known by name. Loaded in every process, maybe twice."""

from __future__ import annotations

CONNECTORS = {"KVPushConnector": ("kvpush.vllm.connector", "KVPushConnector")}


def register() -> None:
    """Registers the connectors. Does nothing for a name that is registered already."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, (module, class_name) in CONNECTORS.items():
        try:
            KVConnectorFactory.register_connector(name, module, class_name)
        except ValueError:
            # Plugins load more than once in a process, and the factory refuses a name that it has.
            continue
