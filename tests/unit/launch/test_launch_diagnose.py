"""The line that a user sees when an engine has died."""

import pytest

from kvpush.launch.diagnose import phase, why_it_died
from kvpush.launch.process import describe_exit

pytestmark = pytest.mark.unit

PREFIX = "(EngineCore pid=77) ERROR 11-30 12:15:41 [core.py:99] "
BEHIND = "\n(APIServer pid=70) RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("log", "cause", "remedy"),
    [
        ("OSError: [Errno 98] Address already in use", "its port is in use", "choose another port"),
        ("ModuleNotFoundError: No module named 'nixl._api'", "the module nixl is missing", "make install"),
        (PREFIX + "RuntimeError: NIXL is not available", "NIXL is not installed or does not load", "kvpush doctor"),
        (
            PREFIX + "ValueError: Unsupported connector type: KVPushConnector",
            "vLLM does not know the connector KVPushConnector",
            "VLLM_PLUGINS",
        ),
        (
            PREFIX + "Failed to load plugin kvpush\n" + PREFIX + "Traceback (most recent call last):\n"
            f"{PREFIX}  File x\n{PREFIX}ImportError: libfoo.so: cannot open\n"
            "ValueError: Unsupported connector type: KVPushConnector",
            "kvpush does not load in vLLM: ImportError: libfoo.so: cannot open",
            "kvpush doctor",
        ),
        ("api_server.py: error: unrecognized arguments: --foo 1", "vLLM does not know the option --foo 1", "--help"),
        (
            "api_server.py: error: argument --dtype: invalid choice: 'float23'",
            "vLLM refuses its options: argument --dtype: invalid choice: 'float23'",
            "--help",
        ),
        (
            "OSError: Can't load the configuration of 'x/y'. If you were trying to load it from ...",
            "vLLM cannot read the model",
            "config.json",
        ),
        (
            PREFIX + "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
            "this vLLM does not support 'FooForCausalLM'",
            "another model",
        ),
        (
            PREFIX
            + "ValueError: To serve at least one request with the models's max seq len (8192), 9 GiB is needed"
            + BEHIND,
            "the KV cache is too small for the model's length",
            "VLLM_CPU_KVCACHE_SPACE",
        ),
        (
            PREFIX + "torch.OutOfMemoryError: CUDA out of memory. Tried",
            "the GPU has too little free memory",
            "end what",
        ),
        (
            PREFIX + "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.",
            "Worker proc VllmWorker-0 died",
            "memory",
        ),
        (
            PREFIX + "RuntimeError: Worker failed with error 'Available memory on node 0 (15.4/19.71 GiB) on kv cache "
            "allocation is less than requested memory for kv (900.0 GiB).'\n"
            + PREFIX
            + "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.",
            "the machine has too little free memory for the KV cache",
            "VLLM_CPU_KVCACHE_SPACE",
        ),
        (
            PREFIX + "OSError: odd\n" + PREFIX + "Worker proc VllmWorker-0 died unexpectedly\nKeyError: 'late'",
            "OSError: odd",
            "",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, User-specified max_model_len (100000) is greater than the derived max_model_len (8192). To "
            "allow overriding this maximum, set [type=value_error, input_value=1]\n    For further information visit",
            "vLLM refuses its options: User-specified max_model_len (100000) is greater than the derived "
            "max_model_len (8192)",
            "--help",
        ),
        (
            "  Value error, Unrecognized model in /m. Should have a `model_type` key [type=value_error]",
            "vLLM does not know this kind of model",
            "another model",
        ),
        (
            "ValueError: Couldn't instantiate the backend tokenizer from one of: \n(1) a file",
            "the model has no usable tokenizer",
            "tokenizer",
        ),
        # Nothing known: the last error that is not the echo of another.
        (
            "Traceback (most recent call last):\nKeyError: 'a'\n"
            + PREFIX
            + "kvpush.vllm.config.ConfigError: side_channel_port: 0"
            + BEHIND,
            "ConfigError: side_channel_port: 0",
            "",
        ),
        ("all is well", "", ""),
        ("", "", ""),
    ],
)
def test_cause_and_remedy(log: str, cause: str, remedy: str) -> None:
    found = why_it_died(log, 1)
    assert found[0] == cause
    assert remedy in found[1]


def test_a_silent_kill_points_to_memory() -> None:
    cause, remedy = why_it_died("all is well", -9)
    assert "killed" in cause
    assert "memory" in remedy


def test_a_long_error_is_cut() -> None:
    assert len(why_it_died("ValueError: " + "x" * 10_000)[0]) <= 300


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit status 0"), (2, "exit status 2"), (-9, "signal SIGKILL"), (-300, "signal 300")]
)
def test_exit_codes_read_well(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_phases_follow_the_log_of_a_real_start() -> None:
    lines = [
        "(APIServer pid=1) INFO [api_utils.py:286] non-default args: {'host': '127.0.0.1'}",
        "(EngineCore pid=2) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m'",
        "(VllmWorker-0 pid=3) INFO [cpu_model_runner.py:71] Starting to load model /m...",
        "(VllmWorker-0 pid=3) INFO [default_loader.py:400] Loading weights took 0.55 seconds",
        "(EngineCore pid=2) INFO [kv_cache_utils.py:1730] CPU KV cache size: 23,296 tokens",
        "(EngineCore pid=2) INFO [core.py:302] init engine (profile, create kv cache, warmup model) took 1.59 seconds",
        "(APIServer pid=1) INFO:     Application startup complete.",
    ]
    seen = [phase("\n".join(lines[:count])) for count in range(len(lines) + 1)]
    assert len(set(seen)) == len(seen)
    assert seen[0] == "loading Python"
    assert seen[-1] == "ready"
