"""A small language model with random weights, whose attention is on the service."""

import flashcore
import numpy as np

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 4, 2, 32, 64
SHAPE = dict(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM)
_WIDTH = HEADS * DIM
_rng = np.random.default_rng(7)
_embedding = _rng.standard_normal((VOCABULARY, _WIDTH))
_logits = _rng.standard_normal((_WIDTH, VOCABULARY)) / 8
_q, _k, _v, _o = (_rng.standard_normal((LAYERS, rows * DIM, columns * DIM)) / np.sqrt(rows * DIM)
                  for rows, columns in ((HEADS, HEADS), (HEADS, KV_HEADS), (HEADS, KV_HEADS), (HEADS, HEADS)))


def step(batch: flashcore.SequenceBatch, tokens: list[list[int]]) -> list[np.ndarray]:
    """Appends tokens[i], at least one, to sequence i of the batch. Returns the logarithm of the probability
    of each next token after each of them, for each sequence: [len(tokens[i]), VOCABULARY]."""
    ends = np.cumsum([0] + [len(some) for some in tokens])
    x = _embedding[np.concatenate(tokens)]
    for layer in range(LAYERS):
        q, k, v = ((_norm(x) @ weights[layer]).astype(np.float16).reshape(len(x), -1, DIM)
                   for weights in (_q, _k, _v))
        o = batch.attend(layer, q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)
        x = x + o.reshape(len(x), -1) @ _o[layer]
    logits = _norm(x) @ _logits
    top = logits.max(axis=1, keepdims=True)
    scores = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return np.split(scores, ends[1:-1])


def _norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True))
