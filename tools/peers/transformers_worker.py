"""transformers' continuous batching for tools/bench_peers.py and tools/bench_gpu.py:
`python transformers_worker.py MODEL_FOLDER THREADS [DEVICE] [DTYPE]`.

Says {"ready": version}; then, for each line of requests, a line of figures.
"""

import json
import pathlib
import sys
import time

import torch
import transformers


def load(folder: str, dtype, device: str):
    """The folder's model; of a folder that holds a config alone, one with random weights."""
    kind = transformers.AutoModelForCausalLM
    if any(pathlib.Path(folder).glob("*.safetensors")):
        return kind.from_pretrained(folder, dtype=dtype).to(device)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        return kind.from_config(config, dtype=dtype)


def run(model, requests: list[dict]) -> dict:
    longest = max(r["max_tokens"] for r in requests)
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(
            do_sample=False, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0
        )
    )
    start = time.perf_counter()
    manager.start()
    for number, request in enumerate(requests):
        manager.add_request(
            request["prompt_ids"], request_id=str(number), max_new_tokens=request["max_tokens"]
        )
    tokens = ended = 0
    while ended < len(requests):
        result = manager.get_result(timeout=600)
        if result is not None and result.is_finished():
            tokens += len(result.generated_tokens)
            ended += 1
    seconds = time.perf_counter() - start
    manager.stop(block=True)
    return {"seconds": seconds, "output_tokens": tokens}


def main():
    device, dtype = (sys.argv[3:] + ["cpu", "float32"][len(sys.argv) - 3 :])[:2]
    torch.set_num_threads(int(sys.argv[2]))
    model = load(sys.argv[1], getattr(torch, dtype), device).eval()
    print(json.dumps({"ready": transformers.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
