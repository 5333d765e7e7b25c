"""transformers' continuous batching for tools/bench_peers.py and tools/bench_gpu.py:
`python transformers_worker.py MODEL_FOLDER THREADS [DEVICE] [DTYPE]`. See answering.py.
"""

import collections
import pathlib
import sys

import answering
import torch
import transformers

MAX_NEW_TOKENS = 2048
PATIENCE_S = 0.01


def load(folder: str, dtype, device: str):
    """The folder's model; of a folder that holds a config alone, one with random weights."""
    kind = transformers.AutoModelForCausalLM
    if any(pathlib.Path(folder).glob("*.safetensors")):
        return kind.from_pretrained(folder, dtype=dtype).to(device)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        return kind.from_config(config, dtype=dtype)


def start(model):
    """Its manager, which runs in a thread of its own."""
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(generation_config=settings)
    manager.start()
    return manager


def engine_of(manager) -> answering.Engine:
    numbers, known = {}, collections.Counter()

    def submit(number: int, request: dict) -> None:
        name = str(len(numbers))
        numbers[name] = number
        manager.add_request(
            request["prompt_ids"],
            request_id=name,
            max_new_tokens=request["max_tokens"],
            streaming=request.get("stream", True),
        )

    def step():
        result = manager.get_result(timeout=PATIENCE_S)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the manager stopped")
            return
        if result.error:
            raise RuntimeError(result.error)
        name, tokens = result.request_id, len(result.generated_tokens)
        yield numbers[name], tokens - known[name], result.is_finished()
        known[name] = tokens

    return answering.Engine(transformers.__version__, submit, step)


def main():
    device, dtype = (sys.argv[3:] + ["cpu", "float32"][len(sys.argv) - 3 :])[:2]
    torch.set_num_threads(int(sys.argv[2]))
    manager = start(load(sys.argv[1], getattr(torch, dtype), device).eval())
    try:
        answering.answer(engine_of(manager))
    finally:
        manager.stop(block=True)


if __name__ == "__main__":
    main()
