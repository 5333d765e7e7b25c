"""OpenVINO GenAI for tools/bench_peers.py: `python openvino_worker.py MODEL.gguf THREADS`.

See answering.py. Prefix caching is on: the caller sends prompts of each run that no other run
shares.
"""

import sys

import answering
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


def engine_of(pipeline) -> answering.Engine:
    handles = {}

    def submit(number: int, request: dict) -> None:
        prompt = openvino.Tensor(np.array([request["prompt_ids"]], np.int64))
        handles[number] = pipeline.add_request(number, prompt, settings(request["max_tokens"]))

    def step():
        pipeline.step()
        for number, handle in list(handles.items()):
            tokens = 0
            while handle.can_read():
                (output,) = handle.read().values()
                tokens += len(output.generated_ids)
            ended = handle.get_status() != genai.GenerationStatus.RUNNING
            if ended:
                del handles[number]
            if tokens or ended:
                yield number, tokens, ended

    return answering.Engine(genai.__version__, submit, step)


if __name__ == "__main__":
    answering.answer(engine_of(make_pipeline(sys.argv[1], int(sys.argv[2]))))
