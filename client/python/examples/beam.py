"""Beam search over a toy model: beams are forks, and a step of all beams is one request.

    python beam.py        # the server is $FLASHCORE_TARGET
"""

import numpy as np

import flashcore

WORDS, HEADS, HEAD_DIM, BEAMS, STEPS = 50, 4, 32, 4, 6
rng = np.random.default_rng(1)
Q, K, V = (rng.standard_normal((WORDS, HEADS, HEAD_DIM)).astype(np.float16) for _ in range(3))
OUT = rng.standard_normal((HEADS * HEAD_DIM, WORDS)).astype(np.float32)


def log_probabilities(output):
    """[beams, words] of O [beams, heads, head_dim]."""
    logits = output.reshape(len(output), -1).astype(np.float32) @ OUT
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def search(client, prompt):
    """The best continuation of `prompt`, a list of words, as (words, log probability)."""
    first = client.create_sequence(1, HEADS, HEAD_DIM)
    first.append(0, K[prompt[:-1]], V[prompt[:-1]])
    beams = [(first, [prompt[-1]], 0.0)]  # K/V without the last word, words, score
    try:
        for _ in range(STEPS):
            last = [words[-1] for _, words, _ in beams]
            output = client.attend_batch([sequence for sequence, _, _ in beams], 0, Q[last], K[last], V[last])
            scores = log_probabilities(output) + np.array([[score] for _, _, score in beams])
            best = np.argsort(-scores, axis=None, kind="stable")[:BEAMS]
            before, kept, beams = beams, set(), []
            for parent, word in zip(*np.unravel_index(best, scores.shape)):
                sequence, words, _ = before[parent]
                beams.append((sequence.fork() if parent in kept else sequence, [*words, int(word)],
                              float(scores[parent, word])))
                kept.add(parent)
            for index, (sequence, _, _) in enumerate(before):
                if index not in kept:
                    sequence.delete()
        return beams[0][1][1:], beams[0][2]
    finally:
        for sequence, _, _ in beams:
            sequence.delete()


if __name__ == "__main__":
    with flashcore.connect() as connected:
        found, likelihood = search(connected, [3, 14, 15, 9])
        print(f"{found}, log probability {likelihood:.3f}")
