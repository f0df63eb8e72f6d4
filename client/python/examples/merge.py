"""Attention over K/V in two places: a prompt on the server, and new rows that never leave this process.

    python merge.py        # the server is $FLASHCORE_TARGET
"""

import numpy as np

import flashcore

HEADS, HEAD_DIM = 8, 64


def attend_here(q, k, v):
    """(O, LSE) in float32 of q, k, v [rows, heads, head_dim]."""
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scores = np.einsum("ihd,jhd->ihj", q, k) / np.sqrt(HEAD_DIM)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("ihj,jhd->ihd", weights / total, v), (top + np.log(total))[..., 0]


def main():
    rng = np.random.default_rng(1)

    def random(rows):
        return rng.standard_normal((rows, HEADS, HEAD_DIM)).astype(np.float16)

    q, (k_there, v_there), (k_here, v_here) = random(4), (random(300), random(300)), (random(20), random(20))
    with flashcore.connect() as client, client.create_sequence(1, HEADS, HEAD_DIM) as prompt:
        prompt.append(0, k_there, v_there)
        there = prompt.attend(0, q, return_lse=True)
        output, _ = flashcore.merge(*there, *attend_here(q, k_here, v_here))

    whole, _ = attend_here(q, np.concatenate([k_there, k_here]), np.concatenate([v_there, v_here]))
    error = np.abs(output.astype(np.float32) - whole).max()
    print(f"merged attention over {len(k_there)} rows there and {len(k_here)} here: error {error:.1e}")
    if error > 1e-3:
        raise SystemExit("the merged result is wrong")


if __name__ == "__main__":
    main()
