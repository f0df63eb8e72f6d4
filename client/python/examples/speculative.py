"""Speculative decoding: a guess of several tokens is checked in one step, and what was wrong is truncated."""

import flashcore
import toy

TOKENS, GUESSES = 64, 4


def guess(tokens: list[int]) -> list[int]:
    """The tokens that followed the last two when they came before (prompt lookup)."""
    for i in range(len(tokens) - 3, -1, -1):
        if tokens[i:i + 2] == tokens[-2:]:
            return tokens[i + 2:i + 2 + GUESSES]
    return []


def generate(client: flashcore.Client, prompt: list[int], speculate: bool) -> tuple[list[int], int]:
    """TOKENS most probable tokens, one after the other, and the number of steps that they took."""
    tokens, steps = list(prompt), 0
    with client.create_sequences(1, **toy.SHAPE) as sequence:
        unseen = list(prompt)  # tokens that the sequence does not have yet
        while len(tokens) < len(prompt) + TOKENS:
            guessed = guess(tokens) if speculate else []
            scores, = toy.step(sequence, [unseen + guessed])
            steps += 1
            best = [int(token) for token in scores[len(unseen) - 1:].argmax(axis=1)]
            right = 0
            while right < len(guessed) and guessed[right] == best[right]:
                right += 1
            tokens += best[:right + 1]
            if right < len(guessed):
                sequence.truncate([len(tokens) - 1])
            unseen = tokens[-1:]
    return tokens[:len(prompt) + TOKENS], steps


def main() -> None:
    prompt = [1, 2, 3, 4, 5]
    with flashcore.connect() as client:
        plain, many = generate(client, prompt, speculate=False)
        fast, few = generate(client, prompt, speculate=True)
    print(f"{TOKENS} tokens in {many} steps, with guesses in {few}")
    assert plain == fast


if __name__ == "__main__":
    main()
