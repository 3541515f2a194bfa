"""What kvpush does not hand over rightly is refused when the engine starts, by the name of the option."""

from types import SimpleNamespace

import pytest

from kvpush.vllm.config import ConfigError, parse_options
from kvpush.vllm.identity import UnsupportedModel, check_engine

pytestmark = pytest.mark.unit


def config(**changes: object) -> SimpleNamespace:
    values = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_sleep_mode": False,
        "calculate_kv_scales": False,
        **changes,
    }
    part = SimpleNamespace(**values)
    return SimpleNamespace(parallel_config=part, model_config=part, cache_config=part)


def test_an_ordinary_engine_is_accepted() -> None:
    check_engine(config())


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("decode_context_parallel_size", 2, "decode_context_parallel_size 2"),
        ("prefill_context_parallel_size", 4, "prefill_context_parallel_size 4"),
        ("data_parallel_size", 2, "data_parallel_size 2"),
        ("enable_sleep_mode", True, "sleep mode"),
        ("calculate_kv_scales", True, "calculate_kv_scales"),
    ],
)
def test_what_would_be_wrong_is_refused(option: str, value: object, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        check_engine(config(**{option: value}))


@pytest.mark.parametrize("host", ["0.0.0.0", "", "224.0.0.1", "a b"])
def test_a_host_that_no_peer_could_reach_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="side_channel_host"):
        parse_options({"side_channel_host": host}, {})
