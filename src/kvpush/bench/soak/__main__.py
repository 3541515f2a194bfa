"""`python -m kvpush.bench.soak`: options, the course of a soak, the table, the verdict.

Exit status: 0 if it was passed, 1 if not, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvpush.bench.environment import command_line, environment, now_iso
from kvpush.bench.raw import SoakRaw, write_raw
from kvpush.bench.soak.deployment import REQUEST_TIMEOUT_S, ROLES, Deployment, DeploymentError, DeploymentOptions
from kvpush.bench.soak.faults import counted
from kvpush.bench.soak.link import Link, why_not
from kvpush.bench.soak.prompts import ReferenceError
from kvpush.bench.soak.run import Course, Soak
from kvpush.launch import Fleet, LaunchError, demo_model

POLICIES = {"fail": ("fail",), "recompute": ("recompute",), "both": ("fail", "recompute")}
NO_LINK, CUT_LINK = "shared-memory", "tcp"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvpush.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of load and faults (default: 15)")
    parser.add_argument("--seed", type=int, help="of prompts and faults (default: a new one)")
    parser.add_argument("--policy", choices=POLICIES, default="both", help="when KV did not come; both: in turns")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (default: 8)")
    parser.add_argument("--interval-s", type=float, default=10.0, help="between two faults (default: 10)")
    parser.add_argument("--integrity", choices=("always", "off"), default="always", help="compare the KV's bytes, too")
    parser.add_argument("--network", choices=("auto", CUT_LINK, NO_LINK), default="auto", help="between the engines")
    parser.add_argument("--out", type=Path, help="folder for the raw file (default: none is written)")
    parser.add_argument("--log-dir", type=Path, help="logs of all processes (default: a temporary folder)")
    args = parser.parse_args(argv)
    for name in ("minutes", "concurrency", "interval_s"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse(argv)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="kvpush-soak-"))
    date = now_iso()
    print(f"soak: seed {seed}, {args.minutes:g} minutes, logs in {log_dir}", flush=True)
    with ExitStack() as stack:
        try:
            reason = "not wanted" if args.network == NO_LINK else why_not()
            if reason and args.network == CUT_LINK:
                print(f"soak: error: {reason}; run it as root, or with --network {NO_LINK}", file=sys.stderr)
                return 2
            if reason:
                print(f"soak: SKIPPED: cuts of the link between the engines: {reason}", flush=True)
            link = None if reason else stack.enter_context(Link())
            fleet = stack.enter_context(Fleet(log_dir))
            policies = POLICIES[args.policy]
            options = DeploymentOptions(str(demo_model()), policies[0], args.integrity, link)
            deployment = Deployment(fleet, options)
            began_s = time.monotonic()
            deployment.start()
            print(f"soak: engines and router ready after {time.monotonic() - began_s:.0f} s", flush=True)
            course = Course(
                seconds=args.minutes * 60,
                interval_s=args.interval_s,
                policies=policies,
                concurrency=args.concurrency,
                seed=seed,
                bound_s=REQUEST_TIMEOUT_S,
            )
            soak = Soak(deployment, link, course)
            asyncio.run(soak.run())
        except (LaunchError, DeploymentError, ReferenceError) as error:
            print(f"soak: error: {error}", file=sys.stderr)
            return 2
    raw = SoakRaw(
        date=date,
        command=command_line("kvpush.bench.soak"),
        environment=environment(),
        seed=seed,
        minutes=args.minutes,
        policies=list(policies),
        integrity=args.integrity,
        link=NO_LINK if link is None else CUT_LINK,
        concurrency=args.concurrency,
        **soak.findings(),
    )
    print(table(raw))
    if args.out is not None:
        path = args.out / f"soak-{raw.link}-{date.replace('-', '').replace(':', '')}.json"
        write_raw(path, raw)
        print(f"soak: written to {path}")
    print(f"soak: {'PASSED' if not raw.problems else 'FAILED'} (seed {seed})")
    return 1 if raw.problems else 0


def table(raw: SoakRaw) -> str:
    """What happened, on a page."""
    lines = ["", f"{'requests':12} {raw.requests:8d}   {raw.requests / raw.minutes / 60:.2f} per second"]
    for outcome in ("right", "error", "aborted", "wrong", "stuck"):
        lines.append(f"  {outcome:10} {raw.outcomes.get(outcome, 0):8d}")
    lines.append(f"{'longest':12} {raw.longest_s:8.1f}   seconds, of those that were not aborted")
    lines += [
        f"    {count:5d} x {error}" for error, count in sorted(raw.errors.items(), key=lambda item: -item[1])[:12]
    ]
    lines.append(f"{'faults':12} {len(raw.faults):8d}")
    lines += [f"  {name:18} {count:5d}" for name, count in counted(raw.faults).items()]
    moved = {role: raw.counters.get(role, {}) for role in ROLES}
    lines.append(
        f"hand-overs committed {moved['prefill'].get('kvpush_sends_total{committed}', 0):.0f}, "
        f"received {moved['decode'].get('kvpush_receives_total', 0):.0f}"
    )
    failed = {name: n for name, n in moved["decode"].items() if name.startswith("kvpush_loads_failed_total{")}
    lines += [f"  not received: {n:5.0f} x {name.partition('{')[2].rstrip('}')}" for name, n in failed.items()]
    lines.append("process                          lived, s   MB first   MB last   growth   handles")
    for one in raw.processes:
        growth = "-" if one.growth is None else f"{one.growth:+.1%}"
        handles = "-" if one.handles_last is None else f"{one.handles_first} -> {one.handles_last}"
        who = f"{one.role} {one.kind}" if one.kind != one.role else one.role
        sizes = f"{one.first_bytes / 1e6:10.1f} {one.last_bytes / 1e6:9.1f}"
        lines.append(f"{who:32} {one.lived_s:8.0f} {sizes} {growth:>8} {handles:>12}")
    lines += [f"PROBLEM: {problem}" for problem in raw.problems]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
