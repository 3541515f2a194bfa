"""HTTP router for prefill and decode engines. It speaks HTTP only and runs without the rest of kvpush."""

from kvpush.router.app import create_app
from kvpush.router.config import ConfigError, RouterConfig
from kvpush.router.server import router_command, run_router

__all__ = ["ConfigError", "RouterConfig", "create_app", "router_command", "run_router"]
