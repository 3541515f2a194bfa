"""The command `kvpush`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

import kvpush
from kvpush.launch import LaunchError

app = typer.Typer(
    name="kvpush",
    help="KV cache transfer by push between vLLM prefill and decode instances.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# For commands that hand their arguments on as they are.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
BENCHMARKS = ("serve", "compare", "transfer", "plan", "summary", "figures", "results")


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Go on serving until Ctrl-C.")] = False,
    model: Annotated[
        str | None, typer.Option(help="A model directory in Hugging Face's layout. Default: SmolLM2-135M-Instruct.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16. Default: float32 on the CPU, bfloat16 on CUDA.")
    ] = None,
    router_port: Annotated[int | None, typer.Option(help="Port of the router. Default: a free one.")] = None,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and answer together, in tokens.")] = 4096,
    start_timeout_s: Annotated[float, typer.Option(help="How long the engines may take to start.")] = 300.0,
    log_dir: Annotated[
        Path | None, typer.Option(help="Where logs go. Default: a temporary directory, removed if all went well.")
    ] = None,
) -> None:
    """Two engines and a router on this machine; five questions, and every answer checked against one engine alone."""
    from kvpush.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        keep=keep,
        model=model,
        device=device,
        dtype=dtype,
        router_port=router_port,
        max_model_len=max_model_len,
        start_timeout_s=start_timeout_s,
        log_dir=log_dir,
    )
    raise typer.Exit(run_demo(options))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    push: Annotated[bool, typer.Option(help="Push some bytes between two processes, really.")] = True,
) -> None:
    """What is installed, what this machine has, and whether a push will work. Exit status 1 if not."""
    from kvpush.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json, try_push=push))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model directory, or a name that vLLM can download.")],
    vllm_args: Annotated[list[str] | None, typer.Argument(help="After --: further options for vLLM.")] = None,
    role: Annotated[str, typer.Option(help="prefill, decode, or both.")] = "both",
    host: Annotated[str, typer.Option(help="Where the API listens.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port of the API. Default: 8100 (prefill), 8200, 8300.")] = None,
    side_channel_host: Annotated[
        str | None, typer.Option(help="Where decode engines find this one. Default: the API's address.")
    ] = None,
    side_channel_port: Annotated[int | None, typer.Option(help="Default: the API's port plus 1.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    load_failure_policy: Annotated[
        str | None, typer.Option(help="When KV does not arrive: fail, or recompute. Default: vLLM's (fail).")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for kv_connector_extra_config; VALUE is JSON or a word.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
) -> None:
    """A vLLM server with kvpush's connector: becomes vLLM's process, with the right --kv-transfer-config."""
    from kvpush.cli.serve import ServeOptions, run_serve

    options = ServeOptions(
        model=model,
        role=role,
        host=host,
        port=port,
        side_channel_host=side_channel_host,
        side_channel_port=side_channel_port,
        device=device,
        load_failure_policy=load_failure_policy,
        connector_options=tuple(option or ()),
        vllm_args=tuple(vllm_args or ()),
        dry_run=dry_run,
    )
    run_serve(options)


@app.command(context_settings=PASS_ON, add_help_option=False)
def router(context: typer.Context) -> None:
    """The router in front of prefill and decode engines (kvpush router --help)."""
    _become("kvpush.router", context.args)


@app.command(context_settings=PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """A benchmark: kvpush bench serve|compare|transfer|plan|summary|figures|results (each has --help)."""
    name, *rest = context.args or [""]
    if name not in BENCHMARKS:
        raise LaunchError(f"there is no benchmark {name!r}" if name else "which benchmark?", " or ".join(BENCHMARKS))
    _become(f"kvpush.bench.{name}", rest)


@app.command()
def trace(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files (trace_file), or HOST:PORT of side channels; both engines' for the legs."),
    ],
    last: Annotated[int, typer.Option(help="How many transfers.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The last transfers of running engines, or of files: when each thing happened, and where the hand-off spent it."""
    from kvpush.cli.trace import run_trace

    raise typer.Exit(run_trace(sources, last, as_json))


@app.command()
def version() -> None:
    """The version of kvpush."""
    print(kvpush.__version__)


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by another of our programs, so that signals and exit status are its own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; every error is one line, `kvpush: error: cause; remedy`.

    Exit status: 0, 1 for what went wrong, 2 for wrong arguments, 130 for Ctrl-C.
    """
    command: Any = get_command(app)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return int(command.main(args=given, prog_name="kvpush", standalone_mode=False) or 0)
    except LaunchError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except typer.Abort:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output has left; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Typer's own errors have this method and no common base class that all of its versions share.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message())
            return 2
        topic = f"kvpush {given[0]}" if given and given[0] in command.commands else "kvpush"
        return _fail(f"{' '.join(message().split()).rstrip('.')}; see {topic} --help", 2)


def _fail(text: str, code: int) -> int:
    print(f"kvpush: error: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
