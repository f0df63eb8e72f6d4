"""Attention over a long prefix on the service and over recent rows here, merged into one result."""

import flashcore
import numpy as np

HEADS, DIM, PREFIX, RECENT = 8, 64, 1000, 24


def here(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """O [rows, heads, head_dim] and LSE [rows, heads] of attention in float32, without a mask."""
    scores = np.einsum("ihd,jhd->ihj", *(x.astype(np.float32) for x in (q, k))) / DIM ** 0.5
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    o = np.einsum("ihj,jhd->ihd", weights / total, v.astype(np.float32))
    return o.astype(np.float16), (top + np.log(total))[..., 0]


def main() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((rows, HEADS, DIM)).astype(np.float16)
               for rows in (1, PREFIX + RECENT, PREFIX + RECENT))
    with flashcore.connect() as client, client.create_sequence(1, HEADS, DIM) as prefix:
        prefix.load(0, k[:PREFIX], v[:PREFIX])
        far = prefix.attend(0, q, return_lse=True)
        near = here(q, k[PREFIX:], v[PREFIX:])
        o, lse = flashcore.merge(*far, *near)
        want, want_lse = client.attend(q, k, v, return_lse=True)
    difference = np.abs(o.astype(np.float32) - want.astype(np.float32)).max()
    lse_difference = np.abs(lse - want_lse).max()
    print(f"merged and computed at once differ by {difference:.1e}, their LSE by {lse_difference:.1e}")
    assert difference < 1e-3 and lse_difference < 1e-3


if __name__ == "__main__":
    main()
