"""Speculative decoding over a toy model: drafted words are checked in one step, wrong ones are truncated.

    python speculative.py        # the server is $FLASHCORE_TARGET
"""

import numpy as np

import flashcore

WORDS, HEADS, HEAD_DIM, DRAFT = 50, 4, 32, 4
rng = np.random.default_rng(1)
Q, K, V = (rng.standard_normal((WORDS, HEADS, HEAD_DIM)).astype(np.float16) for _ in range(3))
OUT = rng.standard_normal((HEADS * HEAD_DIM, WORDS)).astype(np.float32)


def next_words(sequence, words):
    """Appends words; returns the word that the model says after each of them."""
    output = sequence.attend(0, Q[words], K[words], V[words], causal=True)
    return (output.reshape(len(words), -1).astype(np.float32) @ OUT).argmax(axis=-1).tolist()


def draft(words):
    """A guess at the next words: what came after the last word before."""
    places = [place for place, word in enumerate(words[:-1]) if word == words[-1]]
    return words[places[-1] + 1:places[-1] + 1 + DRAFT] if places else []


def generate(client, prompt, count, drafts=True):
    """`count` words after the prompt, and the number of steps that it took."""
    words, steps = list(prompt), 0
    with client.create_sequence(1, HEADS, HEAD_DIM) as sequence:
        sequence.append(0, K[words[:-1]], V[words[:-1]])
        while len(words) < len(prompt) + count:
            guess = draft(words) if drafts else []
            said = next_words(sequence, [words[-1], *guess])
            right = next((i for i, word in enumerate(guess) if word != said[i]), len(guess))
            words += said[:right + 1]
            if right < len(guess):
                sequence.truncate(len(words) - 1)
            steps += 1
    return words[len(prompt):len(prompt) + count], steps


if __name__ == "__main__":
    with flashcore.connect() as connected:
        plain, plain_steps = generate(connected, [3, 14, 15, 9], 60, drafts=False)
        fast, fast_steps = generate(connected, [3, 14, 15, 9], 60)
        print(f"{fast_steps} steps with drafts, {plain_steps} without; the same words: {fast == plain}")
        if fast != plain or fast_steps >= plain_steps:
            raise SystemExit("speculation does not work")
