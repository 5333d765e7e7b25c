"""vLLM on the CPU for tools/bench_peers.py: `python vllm_worker.py MODEL_FOLDER [THREADS]`.

Says {"ready": version}; then, for each line of requests, a line of figures. Scheduler and model
share one process: on few cores a second one spins where the model should compute.
"""

import json
import os
import sys
import time


def make_engine(model: str, threads: int):
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    engine = vllm.LLM(
        model=model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        distributed_executor_backend="uni",
        disable_log_stats=False,
    )
    return vllm, engine


def run(vllm, engine, requests: list[dict]) -> dict:
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True)
        for r in requests
    ]
    prompts = [{"prompt_token_ids": r["prompt_ids"]} for r in requests]
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures = {"seconds": seconds, "output_tokens": tokens}
    if len(requests) == 1:
        metrics = outputs[0].metrics
        figures["ttft_ms"] = metrics.first_token_latency * 1000
        span = metrics.last_token_ts - metrics.first_token_ts
        figures["decode_tokens_per_s"] = (tokens - 1) / span
    return figures


def main():
    answers = os.fdopen(os.dup(1), "w")  # what the library prints goes elsewhere
    os.dup2(2, 1)
    vllm, engine = make_engine(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(vllm, engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
