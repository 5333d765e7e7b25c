"""Attention over a paged cache in float64 numpy: a token and a head at a time, no blocks, no jax.

Written from the definition of softmax attention, apart from the code under test.
"""

import numpy as np


def attend(case, shape, *, layer=0, cache=None):
    """-> (out_THE, cache with the step's K and V written), both float64.

    case: shapes.Case. cache: [L, G, J, 2, K, E] to use instead of the case's own.
    """
    H, J, E = shape.H, shape.J, shape.E
    cache = np.array(case.cache_LGJ2KE if cache is None else cache, np.float64)
    page_size = cache.shape[4]
    out = np.zeros(case.q_THE.shape, np.float64)
    for s in range(case.num_rows):
        begin, end = int(case.cu_q_len_S1[s]), int(case.cu_q_len_S1[s + 1])
        length = int(case.kv_len_S[s])
        first = length - (end - begin)
        for t in range(begin, end):
            position = first + t - begin
            page = case.page_table_SP[s, position // page_size]
            cache[layer, page, :, 0, position % page_size] = case.k_TJE[t]
            cache[layer, page, :, 1, position % page_size] = case.v_TJE[t]
        pages = case.page_table_SP[s, : -(-length // page_size)]
        # [J, 2, tokens, E]
        kv = np.concatenate([cache[layer, p] for p in pages] or [np.zeros((J, 2, 0, E))], axis=2)
        for t in range(begin, end):
            position = first + t - begin
            low = 0 if shape.window is None else max(0, position - shape.window + 1)
            for h in range(H):
                k = kv[h // (H // J), 0, low : position + 1]
                v = kv[h // (H // J), 1, low : position + 1]
                score = k @ np.asarray(case.q_THE[t, h], np.float64) * shape.scale
                if shape.soft_cap is not None:
                    score = shape.soft_cap * np.tanh(score / shape.soft_cap)
                sink = -np.inf if case.sinks_H is None else float(case.sinks_H[h])
                top = max(score.max(), sink)
                weight = np.exp(score - top)
                out[t, h] = weight @ v / (weight.sum() + np.exp(sink - top))
    return out, cache
