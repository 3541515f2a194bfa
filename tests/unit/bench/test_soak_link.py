"""A real network between two namespaces: what is cut says nothing, and what is mended goes on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from kvpush.bench.soak import link as links
from kvpush.bench.soak.link import DECODE, PREFILL, Link, LinkError, why_not

pytestmark = pytest.mark.unit

PORT = 7000
# Sends a line for each that it gets; greets on connection.
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(b"hello")
    while data := peer.recv(100):
        peer.sendall(data)
"""
# Connects, and for each line on its stdin says what came back within a second.
ASK = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
print(peer.recv(100).decode(), flush=True)
peer.settimeout(1.0)
for line in sys.stdin:
    try:
        if line.strip() != "-":
            peer.sendall(line.strip().encode())
        print(peer.recv(100).decode(), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


@pytest.fixture
def link() -> Link:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return Link()


def talk(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_cut_is_silent_and_the_rest_of_the_network_lives(link: Link) -> None:
    with link:
        p, d = link.ends[PREFILL], link.ends[DECODE]
        processes = []
        # One server for each way to reach P: over the link, and from here.
        for address in (p.link_address, p.host_address):
            argv = [*p.prefix, sys.executable, "-c", ECHO, address, str(PORT)]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
        argv = [*d.prefix, sys.executable, "-c", ASK, p.link_address, str(PORT)]
        asker = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(asker)
        guard = threading.Timer(60.0, lambda: [process.kill() for process in processes])
        guard.start()
        try:
            assert asker.stdout is not None
            assert asker.stdout.readline() == "hello\n"
            assert talk(asker, "one") == "one"
            link.cut()
            link.cut()
            assert link.is_cut
            assert talk(asker, "two") == "silence"
            with socket.create_connection((p.host_address, PORT), timeout=5.0) as here:
                assert here.recv(100) == b"hello"
            link.mend()
            assert not link.is_cut
            answers = [talk(asker, "-") for _ in range(5)]
            assert "two" in answers  # nothing was lost: TCP has sent it again
        finally:
            guard.cancel()
            for process in processes:
                process.kill()
                process.wait(timeout=10)
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()


def test_nothing_is_left_behind(link: Link) -> None:
    names = [end.namespace for end in link.ends.values()]
    listed = links._ip("netns", "list")
    assert all(name in listed for name in names)
    link.close()
    left = links._ip("netns", "list") + links._ip("link")
    assert not any(name in left for name in names)
    link.close()  # a second time does nothing


def test_what_a_dead_process_has_left_is_removed(link: Link) -> None:
    link.close()
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait(timeout=30)
    mine, theirs = f"kvp{os.getpid()}-99p", f"kvp{dead.pid}-0p"
    links._ip("netns", "add", theirs)
    links._ip("netns", "add", mine)
    try:
        links.remove_leftovers()
        listed = links._ip("netns", "list")
        assert theirs not in listed
        assert mine in listed
    finally:
        links._quietly("netns", "del", theirs)
        links._quietly("netns", "del", mine)


def test_what_is_not_permitted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_words: str) -> str:
        raise LinkError("ip netns add x: Operation not permitted")

    monkeypatch.setattr(links, "_ip", refused)
    assert "Operation not permitted" in why_not() or "not installed" in why_not()
