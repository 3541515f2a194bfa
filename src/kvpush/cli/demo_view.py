"""What the demo shows: progress, the answers as they come, the table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpush.cli.questions import Question
from kvpush.launch import Server
from kvpush.launch.fleet import Progress

if TYPE_CHECKING:
    from kvpush.cli.demo import Result


class DemoView:
    """Writes to stdout. On a terminal the start-up is shown in place, otherwise as a line for each change."""

    def __init__(self, console: Console | None = None) -> None:
        # Without a terminal there is no width to fit: a table must not be cut at 80 columns of a log file.
        plain = Console(highlight=False)
        self.console = console or (plain if plain.is_terminal else Console(highlight=False, width=110))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def title(self, model: str, devices: Sequence[str], dtype: str) -> None:
        self.say(f"kvpush demo: {model} in {dtype}, prefill on {devices[0]}, decode on {devices[1]}")

    @contextmanager
    def starting(self) -> Iterator[Progress]:
        """Gives the callback for `Fleet.wait_ready`."""
        began_s = time.monotonic()
        told: dict[str, str] = {}

        def lines(servers: Sequence[Server]) -> list[tuple[str, str]]:
            return [
                (server.name, server.phase if server.ready_s is None else f"ready after {server.ready_s:.0f} s")
                for server in servers
            ]

        if not self.console.is_terminal:

            def print_changes(servers: Sequence[Server]) -> None:
                for name, what in lines(servers):
                    if told.get(name) != what:
                        told[name] = what
                        self.say(f"  {time.monotonic() - began_s:4.0f} s  {name}: {what}")

            yield print_changes
            return

        with Live(console=self.console, refresh_per_second=4, transient=False) as live:

            def redraw(servers: Sequence[Server]) -> None:
                seconds = time.monotonic() - began_s
                rows = [Text(f"  {name:<20} {what}") for name, what in lines(servers)]
                live.update(Group(*rows, Text(f"  {seconds:.0f} s", style="dim")))

            yield redraw

    def ready(self, seconds: float) -> None:
        self.say(f"two engines and a router are up after {seconds:.0f} s\n")

    def question(self, number: int, question: Question) -> None:
        self.console.print(Text(f"{number}. {question.title}", style="bold"))

    def text(self, piece: str) -> None:
        """A piece of the answer, as it comes."""
        self.console.print(piece, end="", markup=False, soft_wrap=True)

    def compared(self, result: Result) -> None:
        self.say("")
        if result.verdict == "no":
            self.console.print(Text("   one engine alone answers differently:", style="red"))
            self.say(f"   {result.reference.text}")
        self.say("")

    def table(self, results: Sequence[Result]) -> None:
        table = Table(title="each answer, compared with the decode engine asked alone", title_justify="left")
        for heading in ("question", "prompt tokens", "KV pushed", "writes", "TTFT", "hand-off", "equal"):
            table.add_column(
                heading, justify="left" if heading == "question" else "right", no_wrap=heading != "question"
            )
        for number, result in enumerate(results, 1):
            table.add_row(
                f"{number}. {result.question.title}",
                f"{result.answer.prompt_tokens:,}",
                size(result.handover.sent_bytes),
                f"{result.handover.writes:,}",
                milliseconds(None if result.answer.ttft_s is None else result.answer.ttft_s * 1e3),
                milliseconds(result.handoff_ms),
                Text(result.verdict, style="green" if result.good else "red"),
            )
        self.console.print(table)

    def verdict(self, results: Sequence[Result], good: bool) -> None:
        total_bytes = sum(result.handover.sent_bytes for result in results)
        writes = sum(result.handover.writes for result in results)
        self.say(f"KV bytes written by NIXL from prefill to decode: {total_bytes:,} in {writes:,} writes")
        if good:
            self.say("all five answers equal those of one engine alone")
            return
        for number, result in enumerate(results, 1):
            if result.verdict == "no":
                self.say(f"FAILED: answer {number} differs from that of one engine alone")
            if not result.handover.complete:
                missing = "was committed" if result.handover.sent_bytes == 0 else "was received"
                self.say(f"FAILED: no KV {missing} for question {number}")

    def how_to_go_on(self, url: str, model: str, keep: bool) -> None:
        if not keep:
            self.say("\nTo ask your own questions: kvpush demo --keep (or make demo ARGS=--keep)")
            return
        body = {"model": model, "messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 60}
        self.say(f"\nThe router serves at {url} until Ctrl-C. Ask it:\n")
        self.say(f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n")


def size(number_bytes: int) -> str:
    """Decimal units, as network rates are given."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number_bytes >= scale:
            return f"{number_bytes / scale:.1f} {unit}"
    return f"{number_bytes} B"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms" if abs(value) >= 10 else f"{value:.1f} ms"
