"""`python -m kvpush.router`."""

import typer

from kvpush.router.server import router_command

if __name__ == "__main__":
    typer.run(router_command)
