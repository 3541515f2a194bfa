"""What NixlTransport makes of NIXL's answers, with a NIXL that answers as told: what real peers do not do at will."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvpush.plan.runs import Runs
from kvpush.transport.base import Region, TransportError
from kvpush.transport.nixl import NixlTransport

pytestmark = pytest.mark.unit

ONE = Runs.of((4096, 8192, 16))


class BackendError(Exception):
    pass


class RemoteDisconnectError(Exception):
    pass


class NotFoundError(Exception):
    pass


class FakeAgent:
    """Answers from `answers`; an exception is raised, a callable called. Records every call."""

    answers: dict[str, Any]
    calls: list[tuple]
    backends: dict[str, int]

    def __getattr__(self, what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append((what, *args))
            answer = self.answers.get(what)
            if isinstance(answer, Exception):
                raise answer
            return answer(*args) if callable(answer) else answer

        return call

    def made(self, what: str) -> list[tuple]:
        return [args for name, *args in self.calls if name == what]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    fake = FakeAgent()
    fake.calls, fake.backends = [], {"UCX": 1}
    fake.answers = {
        "add_remote_agent": lambda blob: blob,
        "get_agent_metadata": b"blob",
        "initialize_xfer": "a handle",
        "transfer": "PROC",
        "check_xfer_state": "PROC",
        "get_new_notifs": {},
        "check_remote_metadata": True,
        "get_plugin_list": ["UCX", "POSIX"],
    }
    package, bindings, api = ModuleType("nixl"), ModuleType("nixl._bindings"), ModuleType("nixl._api")
    for kind in (BackendError, RemoteDisconnectError, NotFoundError):
        setattr(bindings, f"nixl{kind.__name__}", kind)
    api.nixl_agent_config = lambda **options: options  # type: ignore[attr-defined]

    def start(name: str, config: dict) -> FakeAgent:
        fake.calls.append(("start", name, config))
        if "start" in fake.answers:
            raise fake.answers["start"]
        return fake

    api.nixl_agent = start  # type: ignore[attr-defined]
    package._bindings, package._api = bindings, api  # type: ignore[attr-defined]
    for module in (package, bindings, api):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake


def metadata_of(name: str, blob: bytes | None = None) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "kvpush.nixl.1", "name": name, "blob": name.encode() if blob is None else blob}
    )


@pytest.fixture
def transport(agent: FakeAgent) -> NixlTransport:
    transport = NixlTransport("me")
    assert transport.connect(metadata_of("peer")) == "peer"
    return transport


def write(transport: NixlTransport) -> Any:
    return transport.write("peer", ONE, None, None, b"n")


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransportError, match="pip install 'nixl"):
        NixlTransport("me")


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_a_name_that_nixl_cannot_have_is_refused(agent: FakeAgent, name: str) -> None:
    with pytest.raises(ValueError, match="1 to 255 bytes"):
        NixlTransport(name)


def test_options_reach_nixl(agent: FakeAgent) -> None:
    agent.backends = {"UCX": 1, "POSIX": 2}
    NixlTransport("me", backends=("UCX", "POSIX"), num_threads=4)
    assert agent.made("start") == [["me", {"backends": ["UCX", "POSIX"], "num_threads": 4}]]


def test_a_missing_backend_is_named_with_those_that_are_there(agent: FakeAgent) -> None:
    with pytest.raises(TransportError, match=r"no backend \['GDS'\]; its plugins are \['UCX', 'POSIX'\]"):
        NixlTransport("me", backends=("UCX", "GDS"))


@pytest.mark.parametrize("error", [BackendError("no device"), RuntimeError("No plugins available")])
def test_an_agent_that_does_not_start_is_a_transport_error(agent: FakeAgent, error: Exception) -> None:
    agent.answers["start"] = error
    with pytest.raises(TransportError, match=str(error)):
        NixlTransport("me")


def test_regions_are_registered_by_memory_type(transport: NixlTransport, agent: FakeAgent) -> None:
    transport.register([Region(4096, 8), Region(8192, 16, device=3), Region(12288, 24)])
    rows = {memory: array.tolist() for array, memory in agent.made("register_memory")}
    assert rows == {"DRAM": [[4096, 8, 0], [12288, 24, 0]], "VRAM": [[8192, 16, 3]]}
    transport.register([])
    assert len(agent.made("register_memory")) == 2


@pytest.mark.parametrize("sides", [(None, None), (0, 1), (None, 2), (5, None)])
def test_descriptors_name_memory_type_and_device(
    transport: NixlTransport, agent: FakeAgent, sides: tuple[int | None, int | None]
) -> None:
    agent.answers["get_xfer_descs"] = lambda rows, memory: (rows.tolist(), memory)
    transport.write("peer", Runs.of((1000, 2000, 8), (3000, 4000, 16)), *sides, b"n")
    ((operation, local, remote, peer, notification),) = agent.made("initialize_xfer")
    kinds = ["DRAM" if device is None else "VRAM" for device in sides]
    ids = [device or 0 for device in sides]
    assert local == ([[1000, 8, ids[0]], [3000, 16, ids[0]]], kinds[0])
    assert remote == ([[2000, 8, ids[1]], [4000, 16, ids[1]]], kinds[1])
    assert (operation, peer, notification) == ("WRITE", "peer", b"n")


def test_a_write_done_at_once_is_not_asked_for_again(transport: NixlTransport, agent: FakeAgent) -> None:
    agent.answers["transfer"] = "DONE"
    handle = write(transport)
    assert transport.done(handle)
    assert agent.made("check_xfer_state") == []


def test_a_post_that_fails_before_anything_is_posted_leaves_nothing_in_flight(
    transport: NixlTransport, agent: FakeAgent
) -> None:
    agent.answers["initialize_xfer"] = NotFoundError("not registered")
    with pytest.raises(TransportError, match=r"1 runs to peer: NotFoundError: not registered") as caught:
        write(transport)
    assert (caught.value.peer, caught.value.may_land) == ("peer", False)
    agent.answers["initialize_xfer"] = "a handle"
    write(transport)


@pytest.mark.parametrize(
    ("error", "may_land"), [(RemoteDisconnectError("gone"), False), (BackendError("third of five"), True)]
)
@pytest.mark.parametrize("when", ["transfer", "check_xfer_state"])
def test_bytes_may_still_land_after_any_error_but_the_end_of_the_peer(
    transport: NixlTransport, agent: FakeAgent, when: str, error: Exception, may_land: bool
) -> None:
    """NIXL frees the requests of a half posted write without waiting for them."""
    agent.answers[when] = error
    with pytest.raises(TransportError, match=f"to peer: {type(error).__name__}") as caught:
        transport.done(write(transport))
    assert (caught.value.peer, caught.value.may_land) == ("peer", may_land)
    # A caller gets no handle of a post that failed, so the transport gives it back itself.
    assert len(agent.made("release_xfer_handle")) == (when == "transfer")


@pytest.mark.parametrize("when", ["transfer", "check_xfer_state"])
def test_the_state_err_is_an_error(transport: NixlTransport, agent: FakeAgent, when: str) -> None:
    agent.answers[when] = "ERR"
    with pytest.raises(TransportError, match="no reason given") as caught:
        transport.done(write(transport))
    assert caught.value.may_land


def test_a_failed_write_stays_failed_without_asking_again(transport: NixlTransport, agent: FakeAgent) -> None:
    handle = write(transport)
    agent.answers["check_xfer_state"] = RemoteDisconnectError("gone")
    for _ in range(3):
        with pytest.raises(TransportError, match="lost a write to peer"):
            transport.done(handle)
    assert len(agent.made("check_xfer_state")) == 1


def test_one_lost_write_loses_the_peer_and_its_other_writes_have_ended_too(
    transport: NixlTransport, agent: FakeAgent
) -> None:
    first, second = write(transport), write(transport)
    agent.answers["check_xfer_state"] = RemoteDisconnectError("gone")
    with pytest.raises(TransportError):
        transport.done(first)
    agent.answers["check_xfer_state"] = NotFoundError("invalidated during transfer")
    with pytest.raises(TransportError) as caught:
        transport.done(second)
    assert not caught.value.may_land
    with pytest.raises(TransportError, match="peer is not connected"):
        write(transport)
    assert transport.connect(metadata_of("peer")) == "peer"
    assert len(agent.made("add_remote_agent")) == 2


def test_a_message_to_a_peer_that_is_gone_loses_it(transport: NixlTransport, agent: FakeAgent) -> None:
    agent.answers["send_notif"] = RemoteDisconnectError("gone")
    with pytest.raises(TransportError, match="cannot send a message to peer: RemoteDisconnectError: gone"):
        transport.notify("peer", b"x")
    assert agent.made("remove_remote_agent") == [["peer"]]
    with pytest.raises(TransportError, match="peer is not connected"):
        transport.notify("peer", b"x")


def test_a_message_that_fails_otherwise_keeps_the_peer(transport: NixlTransport, agent: FakeAgent) -> None:
    agent.answers["send_notif"] = BackendError("busy")
    with pytest.raises(TransportError, match="busy"):
        transport.notify("peer", b"x")
    agent.answers["send_notif"] = None
    transport.notify("peer", b"x")


def test_forgetting_a_peer_waits_for_its_writes(transport: NixlTransport, agent: FakeAgent) -> None:
    """NIXL would answer "not found" for them from then on, while their bytes go on landing."""
    first, second = write(transport), write(transport)
    transport.disconnect("peer")
    assert agent.made("remove_remote_agent") == []
    agent.answers["check_xfer_state"] = "DONE"
    assert transport.done(first)
    assert agent.made("remove_remote_agent") == []
    transport.release(second)
    assert agent.made("remove_remote_agent") == [["peer"]]


def test_a_peer_connected_again_while_it_is_leaving_stays(transport: NixlTransport, agent: FakeAgent) -> None:
    handle = write(transport)
    transport.disconnect("peer")
    assert transport.connect(metadata_of("peer")) == "peer"
    agent.answers["check_xfer_state"] = "DONE"
    assert transport.done(handle)
    assert agent.made("remove_remote_agent") == []
    transport.notify("peer", b"x")


def test_releasing_swallows_what_nixl_says(transport: NixlTransport, agent: FakeAgent) -> None:
    handle = write(transport)
    agent.answers["release_xfer_handle"] = BackendError("still active")
    transport.release(handle)
    transport.release(handle)
    assert len(agent.made("release_xfer_handle")) == 1
    with pytest.raises(ValueError, match="released before it was done"):
        transport.done(handle)


def test_metadata_whose_name_and_agent_differ_is_refused(transport: NixlTransport, agent: FakeAgent) -> None:
    with pytest.raises(TransportError, match="metadata of liar holds the NIXL agent other"):
        transport.connect(metadata_of("liar", b"other"))
    assert agent.made("remove_remote_agent") == [["other"]]
    with pytest.raises(TransportError, match="holds the NIXL agent peer"):
        transport.connect(metadata_of("liar", b"peer"))
    transport.notify("peer", b"still connected")


def test_a_peer_that_nixl_drops_over_broken_metadata_is_known_to_be_gone(
    transport: NixlTransport, agent: FakeAgent
) -> None:
    handle = write(transport)
    agent.answers |= {"add_remote_agent": BackendError("broken"), "check_remote_metadata": False}
    with pytest.raises(TransportError, match="refuses the metadata of another: BackendError: broken"):
        transport.connect(metadata_of("another"))
    with pytest.raises(TransportError, match="peer is not connected"):
        transport.notify("peer", b"x")
    # Its endpoint was not seen to die.
    agent.answers["check_xfer_state"] = NotFoundError("invalidated during transfer")
    with pytest.raises(TransportError) as caught:
        transport.done(handle)
    assert caught.value.may_land


def test_other_metadata_of_a_connected_peer_never_reaches_nixl(transport: NixlTransport, agent: FakeAgent) -> None:
    with pytest.raises(TransportError, match="connected with other metadata"):
        transport.connect(metadata_of("peer", b"other"))
    assert agent.made("add_remote_agent") == [[b"peer"]]


def test_notifications_come_with_their_sender(transport: NixlTransport, agent: FakeAgent) -> None:
    agent.answers["get_new_notifs"] = {"a": [b"1", b"2"], "b": [b"3"]}
    assert transport.notifications() == [("a", b"1"), ("a", b"2"), ("b", b"3")]
    agent.answers["get_new_notifs"] = BackendError("broken")
    with pytest.raises(TransportError, match="cannot read its messages: BackendError: broken"):
        transport.notifications()


def test_closing_gives_everything_back_even_if_nixl_objects(transport: NixlTransport, agent: FakeAgent) -> None:
    agent.answers["register_memory"] = "registered"
    transport.register([Region(4096, 8)])
    write(transport)
    for what in ("release_xfer_handle", "remove_remote_agent", "deregister_memory"):
        agent.answers[what] = BackendError("no")
    transport.close()
    order = [name for name, *_ in agent.calls[-3:]]
    assert order == ["release_xfer_handle", "remove_remote_agent", "deregister_memory"]
    before = len(agent.calls)
    transport.close()
    assert len(agent.calls) == before


def test_a_defect_is_not_dressed_up_as_a_transport_error(transport: NixlTransport, agent: FakeAgent) -> None:
    agent.answers["check_xfer_state"] = AttributeError("a bug")
    with pytest.raises(AttributeError, match="a bug"):
        transport.done(write(transport))
