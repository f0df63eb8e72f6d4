"""Beam search of width 4. Beams share the memory of what they have in common; moving them is one call."""

import flashcore
import numpy as np
import toy

WIDTH, STEPS = 4, 12


def search(client: flashcore.Client, prompt: list[int]) -> tuple[list[int], float]:
    """The most probable continuation that was found, and the logarithm of its probability."""
    with client.create_sequences(1, **toy.SHAPE) as first:
        scores, = toy.step(first, [prompt])
        tokens = [[int(token)] for token in np.argsort(-scores[-1])[:WIDTH]]
        sums = np.sort(-scores[-1])[:WIDTH] * -1
        with first.fork([0] * WIDTH) as beams:
            for _ in range(STEPS - 1):
                scores = np.stack([last[-1] for last in toy.step(beams, [some[-1:] for some in tokens])])
                total = sums[:, None] + scores
                best = np.argsort(-total, axis=None)[:WIDTH]
                parents, chosen = np.unravel_index(best, total.shape)
                beams.reorder(parents.tolist())  # one call: forks and deletes
                tokens = [tokens[parent] + [int(token)] for parent, token in zip(parents, chosen)]
                sums = total.ravel()[best]
    return tokens[0], float(sums[0])


def score(client: flashcore.Client, prompt: list[int], tokens: list[int]) -> float:
    """The logarithm of the probability of the tokens after the prompt, computed at once."""
    with client.create_sequences(1, **toy.SHAPE) as sequence:
        scores, = toy.step(sequence, [prompt + tokens[:-1]])
    return float(sum(scores[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)))


def main() -> None:
    prompt = [1, 2, 3, 4, 5]
    with flashcore.connect() as client:
        tokens, found = search(client, prompt)
        again = score(client, prompt, tokens)
    print(f"{tokens}: log probability {found:.4f}, computed at once {again:.4f}")
    assert abs(found - again) < 0.01


if __name__ == "__main__":
    main()
