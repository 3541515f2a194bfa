"""Starts engines and routers as processes, and ends them: standard library only, no torch, no vLLM."""

from kvpush.launch.engine import Engine, EngineSpec, Role, command, environment, kv_transfer_config
from kvpush.launch.errors import LaunchError
from kvpush.launch.fleet import Fleet
from kvpush.launch.models import demo_model, require_model
from kvpush.launch.ports import free_port, require_free
from kvpush.launch.process import Process
from kvpush.launch.router import RouterProcess
from kvpush.launch.server import Server

__all__ = [
    "Engine",
    "EngineSpec",
    "Fleet",
    "LaunchError",
    "Process",
    "Role",
    "RouterProcess",
    "Server",
    "command",
    "demo_model",
    "environment",
    "free_port",
    "kv_transfer_config",
    "require_free",
    "require_model",
]
