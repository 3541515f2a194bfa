"""Reads a vLLM or router log: what it is doing, and why it died."""

from __future__ import annotations

import re
import signal

# What each line of a starting engine means for a user, in the order in which they appear.
PHASES = (
    (re.compile(r"non-default args|vLLM API server version"), "reading its options"),
    (re.compile(r"Initializing a V1 LLM engine|Initializing a V\d LLM engine"), "starting its core"),
    (re.compile(r"Starting to load model|Loading safetensors"), "loading the weights"),
    (re.compile(r"Loading weights took|Model loading took"), "sizing the KV cache"),
    (re.compile(r"[GC]PU KV cache size|KV cache size"), "making the KV cache"),
    (re.compile(r"Capturing CUDA graph"), "capturing CUDA graphs"),
    (re.compile(r"init engine .* took"), "opening its port"),
    (re.compile(r"Application startup complete|router ready on"), "ready"),
)

# (pattern in the log, cause; group 1 of the pattern is put in for {}, remedy). The first that matches wins, so what is
# particular stands before what is general.
CAUSES = (
    (r"[Aa]ddress already in use", "its port is in use", "choose another port, or end what listens there"),
    (r"No module named '(vllm|nixl|torch|kvpush)\b", "the module {} is missing", "run make install"),
    (r"NIXL is not available", "NIXL is not installed or does not load", "run make install, then kvpush doctor"),
    (
        r"Failed to load plugin kvpush\n[\s\S]*?\b(\w+(?:Error|Exception): .+)",
        "kvpush does not load in vLLM: {}",
        "run kvpush doctor",
    ),
    (
        r"Unsupported connector type: (\S+)",
        "vLLM does not know the connector {}",
        "kvpush is not installed in vLLM's environment, or VLLM_PLUGINS leaves it out",
    ),
    (r"error: unrecognized arguments: (.+)", "vLLM does not know the option {}", "see vLLM's --help"),
    (r"error: (argument .+)", "vLLM refuses its options: {}", "see vLLM's --help"),
    (
        r"(?:Invalid repository ID or local directory specified|Repo id must be in the form"
        r"|is not a local folder and is not a valid model|Cannot find any model weights"
        r"|Can't load the configuration of|does not appear to have a file named (?:config|params)\.json)",
        "vLLM cannot read the model",
        "give a directory with config.json, weights and tokenizer",
    ),
    (
        r"Unrecognized model in|does not recognize this architecture",
        "vLLM does not know this kind of model",
        "use another model, or a newer vLLM",
    ),
    (
        r"Couldn't instantiate the backend tokenizer|Can't load tokenizer for",
        "the model has no usable tokenizer",
        "give a directory with config.json, weights and tokenizer",
    ),
    (r"Model architectures \[(.+?)\] .*not supported", "this vLLM does not support {}", "use another model"),
    (
        r"max seq len \(\d+\) is larger|No available memory for the cache blocks|[Tt]o serve at least one request",
        "the KV cache is too small for the model's length",
        "give a smaller --max-model-len, or more memory (on the CPU: VLLM_CPU_KVCACHE_SPACE, in GiB)",
    ),
    (
        r"CUDA out of memory|Free memory on device",
        "the GPU has too little free memory",
        "end what else runs there, or give a smaller --gpu-memory-utilization",
    ),
    (r"No CUDA GPUs are available|CUDA driver version is insufficient", "no usable GPU", "run kvpush doctor"),
    (
        r"Available memory on node .*is less than requested memory for kv",
        "the machine has too little free memory for the KV cache",
        "free some memory, or set VLLM_CPU_KVCACHE_SPACE (in GiB) to less",
    ),
    (r"Value error, (.+?)(?:\. |\.?\n| \[type=)", "vLLM refuses its options: {}", "see vLLM's --help"),
    (r"Cannot allocate memory|MemoryError|DefaultCPUAllocator: can't allocate", "out of memory", "free some memory"),
    (r"No space left on device", "a file system is full (perhaps /dev/shm)", "free some space there"),
)

# Errors that only say that there was an error elsewhere.
ECHOES = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|EngineCore encountered"
    r"|cancelled|KeyboardInterrupt|SystemExit|BrokenPipeError|ConnectionResetError"
)
# Whatever comes after this is about the death, not about its cause.
CHILD_DIED = re.compile(r"((?:Worker proc|[Ee]ngine core proc) \S+) died unexpectedly")
ERROR_LINE = re.compile(r"(?:^|[\s\])])((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failure)): (.+)$")
LONGEST_CAUSE = 300


def phase(log: str) -> str:
    """The last phase of start-up that the log tells of."""
    for pattern, text in reversed(PHASES):
        if pattern.search(log):
            return text
    return "loading Python"


def why_it_died(log: str, exit_code: int | None = None) -> tuple[str, str]:
    """(cause, remedy); each empty if nothing is known. exit_code: negative for a signal."""
    for pattern, cause, remedy in CAUSES:
        found = re.search(pattern, log)
        if found:
            return cause.format(found[1][:LONGEST_CAUSE] if found.groups() else ""), remedy
    child = CHILD_DIED.search(log)
    if child:
        log = log[: child.start()]
    errors = [found for found in map(ERROR_LINE.search, log.splitlines()) if found and not ECHOES.search(found[0])]
    if errors:
        # An exception that led to others is printed before them, and an engine's comes before its server's.
        return f"{errors[-1][1].rpartition('.')[2]}: {errors[-1][2]}"[:LONGEST_CAUSE], ""
    if child:
        return f"{child[1]} died", "if nobody killed it, it ran out of memory (see dmesg)"
    if exit_code == -signal.SIGKILL:
        return "somebody or the kernel killed it", "if nobody did, it ran out of memory (see dmesg)"
    return "", ""
