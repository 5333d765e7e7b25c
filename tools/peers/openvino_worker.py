"""OpenVINO GenAI for tools/bench_peers.py: `python openvino_worker.py MODEL.gguf [THREADS]`.

Says {"ready": version}; then, for each line of requests, a line of figures. Prefix caching is on:
the caller sends prompts of each run that no other run shares.
"""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai


def make_pipeline(model: str, threads: int):
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = 1  # GiB
    scheduling.max_num_batched_tokens = 512
    scheduling.max_num_seqs = 64
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = True
    options = {"INFERENCE_NUM_THREADS": threads}
    return genai.ContinuousBatchingPipeline(model, scheduling, "CPU", options)


def settings(max_tokens: int):
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def run(pipeline, requests: list[dict]) -> dict:
    prompts = [openvino.Tensor(np.array([r["prompt_ids"]], np.int64)) for r in requests]
    start = time.perf_counter()
    outputs = pipeline.generate(prompts, [settings(r["max_tokens"]) for r in requests])
    seconds = time.perf_counter() - start
    tokens = sum(len(output.m_generation_ids[0]) for output in outputs)
    figures = {"seconds": seconds, "output_tokens": tokens}
    if len(requests) == 1:
        figures["ttft_ms"] = outputs[0].perf_metrics.get_ttft().mean
        figures["decode_tokens_per_s"] = 1000 / outputs[0].perf_metrics.get_tpot().mean
    return figures


def main():
    pipeline = make_pipeline(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(pipeline, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
