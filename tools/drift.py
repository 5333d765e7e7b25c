"""How far each weight form moves a model from its float32 reference, on prompts with known answers.

    python tools/drift.py MODEL GOLDENS.json [--forms float32,auto,int8] [--cases 4]

MODEL is what --model takes; GOLDENS.json holds prompts, 48 greedy tokens each and their
log-probabilities. Every form is fed the reference's tokens (teacher forced), so one flipped token
does not hide the next. Printed per form: bytes, tokens that agree, the largest and the mean
difference of the chosen tokens' log-probabilities, and the widest gap to a runner-up that was
flipped.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import models
from jaxserve.models.config import Backend
from jaxserve.pallas_kernels.linear import api as linear_op
from jaxserve.pallas_kernels.ragged_paged_attention import api

PAGE, BUCKET = 16, 128


def score(model, ids):
    """float64 logits [len(ids), V] of one sequence, in chunks of BUCKET over a paged cache."""
    backend, pages = model.config.backend.attention, -(-len(ids) // PAGE)
    spec = model.config.kv_spec(PAGE, jnp.float32)
    kv_pages = api.init_kv_pages(spec, pages + 1, backend)
    step = jax.jit(functools.partial(_step, model), donate_argnums=1)
    rows = []
    for start in range(0, len(ids), BUCKET):
        chunk = ids[start : start + BUCKET]
        tokens = np.zeros((2, BUCKET), np.int32)
        tokens[0, : len(chunk)] = chunk
        tokens[1, : len(chunk)] = np.arange(start, start + len(chunk))
        batch = api.RaggedBatch(
            page_table_SP=jnp.arange(1, pages + 1, dtype=jnp.int32)[None],
            kv_len_S=jnp.array([start + len(chunk)], jnp.int32),
            cu_q_len_S1=jnp.array([0, len(chunk)], jnp.int32),
            num_rows=jnp.array([1], jnp.int32),
            num_decode=jnp.array([0], jnp.int32),
        )
        logits, kv_pages = step(model.params, kv_pages, jnp.asarray(tokens), batch)
        rows.append(np.float64(logits[: len(chunk)]))
    return np.concatenate(rows)


def _step(model, params, kv_pages, tokens, batch):
    def attend(q, k, v, pages, **settings):
        backend = model.config.backend.attention
        return api.ragged_paged_attention(q, k, v, pages, batch, **settings, backend=backend)

    hidden, kv_pages = model.family.forward(params, model.config, *tokens, kv_pages, attend)
    return model.family.logits(params, model.config, hidden), kv_pages


def drift(model, cases):
    """-> (tokens alike, tokens in all, log-probability differences, widest flipped gap)."""
    alike, differences, flipped = 0, [], 0.0
    for case in cases:
        prompt, output = case["prompt_ids"], case["output_ids"]
        rows = score(model, prompt + output[:-1])[len(prompt) - 1 :]
        peak = rows.max(-1, keepdims=True)
        logprobs = rows - peak - np.log(np.exp(rows - peak).sum(-1, keepdims=True))
        chosen = np.take_along_axis(logprobs, np.array(output)[:, None], 1)[:, 0]
        differences += np.abs(chosen - case["logprobs"]).tolist()
        same = rows.argmax(-1) == output
        alike += int(same.sum())
        flipped = max([flipped, *np.array(case["gaps"])[~same]])
    return alike, len(differences), np.array(differences), flipped


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("goldens", type=pathlib.Path)
    parser.add_argument("--forms", default="float32,auto,int8")
    parser.add_argument("--cases", type=int, default=None)
    args = parser.parse_args()
    cases = json.loads(args.goldens.read_text())["cases"][: args.cases]
    platform = jax.default_backend()
    backend = Backend(
        attention=api.choose_backend(platform),
        linear=linear_op.choose_backend(platform),
        stacked=linear_op.choose_backend(platform) == "cpu",
    )
    print(backend)
    print(f"{'form':24} {'MB':>7} {'alike':>9} {'max':>9} {'mean':>9} {'flipped gap':>12}")
    for form in args.forms.split(","):
        model = models.load(args.model, weight_dtype=form, backend=backend)
        alike, count, differences, flipped = drift(model, cases)
        label = form if form == model.weight_dtype else f"{form}: {model.weight_dtype}"
        print(
            f"{label:24} {model.weight_bytes / 1e6:7.1f} {alike:4}/{count:4} "
            f"{differences.max():9.2g} {differences.mean():9.2g} {flipped:12.2g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
