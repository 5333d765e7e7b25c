"""vLLM on the CPU for tools/bench_peers.py: `python vllm_worker.py MODEL_FOLDER THREADS`.

See answering.py. Scheduler and model share one process: on few cores a second one spins where the
model should compute.
"""

import os
import sys

import answering


def make_engine(model: str, threads: int):
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    llm = vllm.LLM(
        model=model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        distributed_executor_backend="uni",
    )
    return vllm, llm.llm_engine


def engine_of(vllm, engine) -> answering.Engine:
    ids = {}  # vLLM's own id of a request -> its number

    def submit(number: int, request: dict) -> None:
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        name = str(len(ids))
        ids[name] = number
        engine.add_request(name, {"prompt_token_ids": request["prompt_ids"]}, params)

    def step():
        for output in engine.step():
            tokens = len(output.outputs[0].token_ids)
            yield ids[output.request_id], tokens, output.finished

    return answering.Engine(vllm.__version__, submit, step)


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")  # what the library prints goes elsewhere
    os.dup2(2, 1)
    answering.answer(engine_of(*make_engine(sys.argv[1], int(sys.argv[2]))), out)
