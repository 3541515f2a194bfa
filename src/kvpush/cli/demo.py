"""`kvpush demo`: a prefill engine, a decode engine, a router, five questions, and the proof that the KV travelled."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvpush.cli.chat import Answer, ChatError, ask
from kvpush.cli.demo_view import DemoView
from kvpush.cli.devices import choose_devices
from kvpush.cli.handover import Handover, handoff_ms, handovers
from kvpush.cli.questions import QUESTIONS, Question
from kvpush.launch import (
    EngineSpec,
    Fleet,
    LaunchError,
    Role,
    RouterProcess,
    demo_model,
    free_port,
    installed,
    require_free,
    require_model,
)

DTYPES = ("float32", "bfloat16", "float16", "auto")
ROLES: tuple[Role, Role] = ("prefill", "decode")
ANSWER_TOKENS = 48
# The two lines of a transfer are written within milliseconds of the answer; a slow disk gets this long.
LOG_TIMEOUT_S = 5.0
# After a failed request: how long to wait for the process whose death explains it.
DEATH_TIMEOUT_S = 8.0
WATCH_S = 0.25
# The pair computes the last prompt token with the decode kernel, one engine with the prefill kernel. In half precision
# rounding can flip a choice between two candidates that are closer than this (in nats); in float32 there is no excuse.
NEAR_TIE = 0.25
# Memory share of each engine if both must live on one GPU.
SHARED_GPU_SHARE = "0.4"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """See `kvpush demo --help`."""

    keep: bool = False
    model: str | None = None
    device: str = "auto"
    dtype: str | None = None
    router_port: int | None = None
    max_model_len: int = 4096
    start_timeout_s: float = 300.0
    log_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One question, answered by the pair and by one engine alone. verdict: `yes`, `near tie` or `no`."""

    question: Question
    answer: Answer
    reference: Answer
    handover: Handover
    handoff_ms: float | None
    verdict: str

    @property
    def good(self) -> bool:
        return self.verdict != "no" and self.handover.complete


def run_demo(options: DemoOptions) -> int:
    """Exit status 0 only if every answer is equal and KV was written for each. Raises LaunchError."""
    if options.dtype is not None and options.dtype not in DTYPES:
        raise LaunchError(f"--dtype is {options.dtype!r}", f"it must be one of {', '.join(DTYPES)}")
    if options.max_model_len < 1024:
        raise LaunchError(f"--max-model-len is {options.max_model_len}", "the questions need at least 1024")
    if options.start_timeout_s <= 0:
        raise LaunchError(f"--start-timeout-s is {options.start_timeout_s:g}", "it must be above 0")
    if options.router_port is not None:
        require_free(options.router_port, "--router-port")
    installed.require_engine_parts()
    devices = choose_devices(options.device)
    model = None if options.model is None else require_model(options.model)
    view = DemoView()
    model = model or str(demo_model(view.say))
    log_dir = _log_dir(options.log_dir)
    with Fleet(log_dir) as fleet:
        good = _Demo(options, fleet, view, model, devices).run()
    if not good:
        view.say(f"logs: {log_dir}")
    elif options.log_dir is None:
        shutil.rmtree(log_dir, ignore_errors=True)
    return 0 if good else 1


def _log_dir(wanted: Path | None) -> Path:
    try:
        if wanted is None:
            return Path(tempfile.mkdtemp(prefix="kvpush-demo-"))
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    except OSError as error:
        raise LaunchError(
            f"--log-dir {wanted}: {error.strerror or error}", "give a directory that can be written"
        ) from None


class _Demo:
    def __init__(self, options: DemoOptions, fleet: Fleet, view: DemoView, model: str, devices: list[str]) -> None:
        self.options = options
        self.fleet = fleet
        self.view = view
        self.model = model
        self.name = Path(model).name
        self.devices = devices
        on_cpu = devices[0] == "cpu"
        self.dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
        self.exact = self.dtype == "float32"
        self.log_timeout_s = LOG_TIMEOUT_S

    def run(self) -> bool:
        options = self.options
        shared = self.devices[0] == self.devices[1] != "cpu"
        extra = ("--served-model-name", self.name, *(("--gpu-memory-utilization", SHARED_GPU_SHARE) if shared else ()))
        self.view.title(self.name, self.devices, self.dtype)
        began_s = time.monotonic()
        self.prefill, self.decode = (
            self.fleet.engine(
                EngineSpec(
                    model=self.model,
                    role=role,
                    port=free_port(),
                    side_channel_port=free_port(),
                    device=device,
                    dtype=self.dtype,
                    max_model_len=options.max_model_len,
                    extra_args=extra,
                )
            )
            for role, device in zip(ROLES, self.devices, strict=True)
        )
        with self.view.starting() as on_progress:
            self.fleet.wait_ready(options.start_timeout_s, on_progress)
            self.router: RouterProcess = self.fleet.router([self.prefill], [self.decode], port=options.router_port)
            self.fleet.wait_ready(60, on_progress)
        self.view.ready(time.monotonic() - began_s)
        results = asyncio.run(self._all_questions())
        self.view.table(results)
        good = all(result.good for result in results)
        self.view.verdict(results, good)
        self.view.how_to_go_on(self.router.url, self.name, self.options.keep)
        if self.options.keep:
            self._serve_until_interrupted()
        return good

    async def _all_questions(self) -> list[Result]:
        results = []
        # Engines close idle connections after 5 s; on busy cores a question could meet one that is just being closed.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(trust_env=False, connector=connector) as session:
            for number, question in enumerate(QUESTIONS, 1):
                self.view.question(number, question)
                result = await self._guarded(self._one(session, question))
                self.view.compared(result)
                results.append(result)
        return results

    async def _guarded(self, work: Any) -> Result:
        """Ends the work as soon as a process of the fleet has died. Raises LaunchError."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self.fleet.require_alive()
                await asyncio.wait({task}, timeout=WATCH_S)
            result: Result = task.result()
            return result
        except ChatError as error:
            deadline_s = time.monotonic() + DEATH_TIMEOUT_S
            while time.monotonic() < deadline_s:
                self.fleet.require_alive()
                await asyncio.sleep(WATCH_S)
            raise LaunchError(str(error), f"see the logs in {self.fleet.log_dir}") from None
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _one(self, session: aiohttp.ClientSession, question: Question) -> Result:
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": question.prompt}],
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
        }
        margins = not self.exact
        answer = await ask(session, self.router.url, body, self.view.text, margins=margins)
        # A salt of its own: the reference must not be computed from the KV that was just handed over and cached.
        salted = {**body, "cache_salt": uuid.uuid4().hex}
        reference = await ask(session, self.decode.url, salted, margins=margins)
        handover = await self._handover(answer.transfer_id or "")
        status: dict[str, Any] = {}
        try:
            async with session.get(f"{self.router.url}/kvpush/status", timeout=aiohttp.ClientTimeout(total=10)) as got:
                status = await got.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ChatError(f"{self.router.url}/kvpush/status: {error}") from None
        waited_ms = handoff_ms(status, answer.transfer_id or "")
        return Result(question, answer, reference, handover, waited_ms, verdict(answer, reference, exact=self.exact))

    async def _handover(self, transfer_id: str) -> Handover:
        """The transfer's lines from both logs, which may be a moment late."""
        deadline_s = time.monotonic() + self.log_timeout_s
        while True:
            found = handovers(self.prefill.log_tail(), self.decode.log_tail()).get(transfer_id, Handover())
            if found.complete:
                return found
            if time.monotonic() > deadline_s:
                self.log_timeout_s = 0.0  # an engine that does not report will not do so for the other questions
                return found
            await asyncio.sleep(0.05)

    def _serve_until_interrupted(self) -> None:
        try:
            while True:
                self.fleet.require_alive()
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            self.view.say("stopping")


def verdict(answer: Answer, reference: Answer, *, exact: bool) -> str:
    """Compares the pair's answer with that of one engine alone: `yes`, `near tie` or `no`.

    exact: no excuse. Otherwise answers may part where the reference's two best tokens are closer than `NEAR_TIE`.
    """
    if answer.text == reference.text and answer.prompt_tokens == reference.prompt_tokens and answer.text:
        return "yes"
    if exact or answer.prompt_tokens != reference.prompt_tokens:
        return "no"
    for place, (ours, theirs) in enumerate(zip(answer.tokens, reference.tokens, strict=False)):
        if ours != theirs:
            return "near tie" if reference.margins[place] < NEAR_TIE else "no"
    return "no"
