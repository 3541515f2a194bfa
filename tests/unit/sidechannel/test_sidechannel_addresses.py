"""Which addresses may be connected to."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidechannel_cases import GRACE_S, patient, takes_at_most

from kvpush.transfer.addresses import AddressRefused, AllowList, check_form, numeric_addresses

pytestmark = pytest.mark.unit


def no_resolver(host: str, timeout_s: float) -> tuple[str, ...]:
    raise AssertionError(f"{host} must not be resolved")


def resolver(table: dict[str, tuple[str, ...]]):
    asked: list[str] = []

    def resolve(host: str, timeout_s: float) -> tuple[str, ...]:
        asked.append(host)
        if host not in table:
            raise OSError(f"host name {host} could not be resolved")
        return table[host]

    return resolve, asked


@pytest.mark.parametrize(
    ("patterns", "host", "connect_to"),
    [
        (["*"], "anything.example", "anything.example"),
        (["*"], "10.1.2.3", "10.1.2.3"),
        (["gpu-1"], "gpu-1", "gpu-1"),
        (["GPU-1.Example."], "gpu-1.example", "gpu-1.example"),
        (["gpu-1"], "GPU-1.", "gpu-1"),
        (["gpu_1"], "gpu_1", "gpu_1"),
        (["10.1.2.3"], "10.1.2.3", "10.1.2.3"),
        (["10.0.0.0/8"], "10.255.255.255", "10.255.255.255"),
        (["10.0.0.0/8"], "::ffff:10.1.2.3", "10.1.2.3"),
        (["::ffff:10.1.2.3"], "10.1.2.3", "10.1.2.3"),
        (["fd00::/8"], "fd00::1", "fd00::1"),
        (["fd00::/8"], "[FD00:0::1]", "fd00::1"),
        (["[::1]"], "0:0:0:0:0:0:0:1", "::1"),
        (["gpu-1", "192.168.0.0/24", "10.0.0.7"], "10.0.0.7", "10.0.0.7"),
    ],
)
def test_allowed_without_asking_a_resolver(patterns, host, connect_to) -> None:
    assert AllowList(patterns, resolve=no_resolver).check(host, 5600) == connect_to


@pytest.mark.parametrize(
    ("patterns", "host"),
    [
        ([], "10.1.2.3"),
        ([], "gpu-1"),
        (["gpu-1"], "gpu-2"),
        (["gpu-1"], "gpu-1.example"),
        (["gpu-1.example"], "gpu-1"),
        (["gpu-1"], "10.1.2.3"),
        (["10.1.2.3"], "10.1.2.4"),
        (["10.0.0.0/8"], "11.0.0.0"),
        (["10.0.0.0/8"], "fd00::1"),
        (["0.0.0.0/0"], "fd00::1"),
        (["::/0"], "10.1.2.3"),
        (["fd00::/8"], "fe80::1"),
    ],
)
def test_not_listed_is_refused_by_name(patterns, host) -> None:
    with pytest.raises(AddressRefused, match="not in the allow list") as caught:
        AllowList(patterns, resolve=no_resolver).check(host, 5600)
    assert host in str(caught.value)
    assert "5600" in str(caught.value)


def test_a_name_is_resolved_once_and_its_address_is_what_to_connect_to() -> None:
    resolve, asked = resolver({"gpu-1": ("10.0.0.1", "10.0.0.2")})
    assert AllowList(["10.0.0.0/8"], resolve=resolve).check("GPU-1", 5600) == "10.0.0.1"
    assert asked == ["gpu-1"]


@pytest.mark.parametrize(
    "found", [("10.0.0.1", "169.254.169.254"), ("127.0.0.1",), ("10.0.0.1", "::1"), ("10.0.0.1", "nonsense"), ()]
)
def test_one_address_outside_refuses_the_name(found) -> None:
    resolve, _ = resolver({"gpu-1": found})
    with pytest.raises(AddressRefused, match="gpu-1"):
        AllowList(["10.0.0.0/8"], resolve=resolve).check("gpu-1", 5600)


def test_a_name_that_stands_for_every_address_is_refused() -> None:
    resolve, _ = resolver({"gpu-1": ("0.0.0.0",)})
    with pytest.raises(AddressRefused, match="not the address of one machine"):
        AllowList(["0.0.0.0/0"], resolve=resolve).check("gpu-1", 5600)


def test_a_name_that_cannot_be_resolved_is_refused() -> None:
    resolve, _ = resolver({})
    with pytest.raises(AddressRefused, match=r"gpu-1.*could not be resolved"):
        AllowList(["10.0.0.0/8"], resolve=resolve).check("gpu-1", 5600)


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        (None, 5600, "must be a string, not NoneType"),
        (["gpu-1"], 5600, "must be a string, not list"),
        (b"gpu-1", 5600, "must be a string, not bytes"),
        ("", 5600, "empty"),
        ("x" * 254, 5600, "254 characters"),
        ("x" * 1_000_000, 5600, "1000000 characters"),
        ("x" * 64, 5600, "neither"),
        ("gpu 1", 5600, "neither"),
        ("gpu-1\n", 5600, "neither"),
        ("10.0.0.1\n", 5600, "neither"),
        ("-gpu", 5600, "neither"),
        ("gpu..example", 5600, "neither"),
        (".", 5600, "neither"),
        ("gpu-1:5600", 5600, "neither"),
        ("http://gpu-1", 5600, "neither"),
        ("user@gpu-1", 5600, "neither"),
        ("../etc", 5600, "neither"),
        ("gpü", 5600, "neither"),
        ("[gpu-1]", 5600, "neither"),
        ("fe80::1%a b", 5600, "neither"),
        ("fe80::1%" + "x" * 40, 5600, "neither"),
        ("127.1", 5600, "ends in a number"),
        ("2130706433", 5600, "ends in a number"),
        ("0x7f000001", 5600, "ends in a number"),
        ("0177.0.0.1", 5600, "ends in a number"),
        ("10.0.0.256", 5600, "ends in a number"),
        ("0.0.0.0", 5600, "not the address of one machine"),
        ("::", 5600, "not the address of one machine"),
        ("::ffff:0.0.0.0", 5600, "not the address of one machine"),
        ("224.0.0.1", 5600, "not the address of one machine"),
        ("ff02::1", 5600, "not the address of one machine"),
        ("255.255.255.255", 5600, "not the address of one machine"),
        ("gpu-1", 0, "1 to 65535"),
        ("gpu-1", -1, "1 to 65535"),
        ("gpu-1", 65536, "1 to 65535"),
        ("gpu-1", True, "integer, not bool"),
        ("gpu-1", "5600", "integer, not str"),
        ("gpu-1", 5600.0, "integer, not float"),
        ("gpu-1", None, "integer, not NoneType"),
    ],
)
def test_what_is_no_address_is_refused_even_if_all_are_allowed(host, port, text) -> None:
    with pytest.raises(AddressRefused, match=text) as caught:
        AllowList(["*"], resolve=no_resolver).check(host, port)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@patient
@given(json_like, json_like)
def test_whatever_a_client_sends_is_an_address_or_refused(host, port) -> None:
    for check in (check_form, AllowList([], resolve=no_resolver).check):
        text = ""
        try:
            check(host, port)
        except AddressRefused as error:
            text = str(error)
        assert text.isprintable()


@patient
@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_address_is_only_allowed_by_itself(address, port) -> None:
    try:
        host, _ = check_form(str(address), port)
    except AddressRefused:
        return
    assert AllowList([str(address)], resolve=no_resolver).check(str(address), port) == host
    other = str(address + 1) if int(address) % 2 == 0 else str(address - 1)
    with pytest.raises(AddressRefused):
        AllowList([str(address)], resolve=no_resolver).check(other, port)


@pytest.mark.parametrize(
    "pattern", ["", "10.0.0.0/33", "10.0.0.1/8", "*.example", "a b", "10.0.0", "http://x", 5, None]
)
def test_a_pattern_that_is_none_is_named(pattern) -> None:
    with pytest.raises(ValueError, match="allow list pattern") as caught:
        AllowList(["gpu-1", pattern])
    assert repr(pattern) in str(caught.value)


def test_a_string_is_no_list_of_patterns() -> None:
    with pytest.raises(ValueError, match="list of host patterns"):
        AllowList("10.0.0.0/8")


def test_localhost_resolves_to_loopback_addresses() -> None:
    found = numeric_addresses("localhost", 10.0)
    assert found
    assert set(found) <= {"127.0.0.1", "::1"}
    assert AllowList(["127.0.0.0/8", "::1"]).check("localhost", 5600) == found[0]
    assert numeric_addresses("[::1]", 0.0) == ("::1",)


def test_a_resolver_that_hangs_is_left_alone(monkeypatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("kvpush.transfer.addresses.socket.getaddrinfo", lambda *a, **k: release.wait(20) and [])
    try:
        with takes_at_most(0.2 + GRACE_S), pytest.raises(AddressRefused, match=r"gpu-1:5600.*within 0\.2 s"):
            AllowList(["10.0.0.0/8"], resolve_timeout_s=0.2).check("gpu-1", 5600)
    finally:
        release.set()
