"""The cost of the ways to store K/V for a language model whose attention the server computes.

AntiBERTy runs here in float32, over antibodies with some residues masked. The K/V of each layer is appended
to sequences of the server, one for each antibody, and attended to. Prints

    K/V             how sequences store it (kv_dtype), and the products that requests accept (precision), if
                    a device has others than of 16 bits; float32: attention computed here
    perplexity      of the masked residues
    top-1           residues whose most likely value is that of float32
    error of O      relative L2 error over all antibodies against attention in float64 on the rows that were
                    sent: the smallest and the largest of the layers
    of the theory   that error over the one that the roundings of stored rows and of O must make

The weights are 97 MB of PyPI, kept in downloads/ of the build. FLASHCORE_TEST_DEVICE chooses the device.
"""

import pathlib
import typing

import antiberty
import antibodies
import flashcore
import numpy as np
from antiberty import DIM, FIRST_RESIDUE, HEADS, LAYERS, MASK

import harness
from kv_8bit_test import e4m3_steps

DOWNLOADS = pathlib.Path(harness.SERVER).resolve().parents[1] / "downloads"


# The distance of neighbouring numbers that can be stored, for each element of rows [rows, heads, head_dim].
# KvDType in the contract has the formats. Scales are not rounded to BF16 here, which is 0.8% at most.


def int8_steps(rows):
    return np.broadcast_to(np.abs(rows).max(axis=-1, keepdims=True) / 127, rows.shape)


def float8_e4m3_steps(rows):
    scales = np.abs(rows).max(axis=-1, keepdims=True) / 448
    return scales * e4m3_steps(rows / scales)


class Limits(typing.NamedTuple):
    steps: typing.Callable
    top1: float        # at least
    perplexity: float  # its relative difference from that of float32, at most
    theory: tuple      # error of O over that of the theory, from and to


TILE_TOKENS = 64  # that share a scale of 8-bit probabilities

# GPUs round probabilities to float16, too, which the theory leaves out: it is about as much as rounding O.
LIMITS = {
    "same_as_query": Limits(np.zeros_like, 0.998, 0.001, (0.8, 2)),
    "int8": Limits(int8_steps, 0.99, 0.01, (0.9, 1.1)),
    "float8_e4m3": Limits(float8_e4m3_steps, 0.99, 0.01, (0.85, 1.1)),
}
# For products of codes. Rounding a row of Q moves all its scores together, which the theory leaves out.
THEORY_OF_CODES = (0.8, 1.25)


def exact_attention(q, k, v):
    """O and the probabilities [heads, queries, keys], in the type of the arguments."""
    scores = np.einsum("ihd,jhd->hij", q, k) / DIM ** 0.5
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, v), p


def squared_errors_of_codes(p, scales):
    """Squared errors of 8-bit probabilities: p times the scales of V's rows [keys, heads] in steps of 1/255
    of the largest of a tile. Values below half a step are lost."""
    squares = np.empty_like(p)
    for begin in range(0, p.shape[-1], TILE_TOKENS):
        tile = slice(begin, begin + TILE_TOKENS)
        weights = p[:, :, tile] * scales.T[:, None, tile]
        half_steps = weights.max(axis=-1, keepdims=True) / 510
        lost = np.where(weights < half_steps, weights ** 2, half_steps ** 2 / 3)
        squares[:, :, tile] = lost / scales.T[:, None, tile] ** 2
    return squares


def expected_squared_error(q, k, v, o, p, steps, precision):
    """The error of all of O together, if each stored element of K and V, each of O, and with 8-bit products
    each code of Q and of P, is off by a random part of half a step, which has the variance step^2 / 12."""
    of_scores = np.einsum("ihd,jhd->hij", q ** 2, steps(k) ** 2) / DIM / 12
    if precision != "16bit":
        of_scores += np.einsum("ihd,jhd->hij", int8_steps(q) ** 2, k ** 2) / DIM / 12
    weights = p ** 2 * of_scores
    # Sum over j of weights * (v - o)^2, where a score moves O towards or away from its v.
    moved = (np.einsum("hij,jhd->ihd", weights, v ** 2) - 2 * o * np.einsum("hij,jhd->ihd", weights, v)
             + o ** 2 * weights.sum(axis=-1).T[:, :, None])
    of_values = np.einsum("hij,jhd->ihd", p ** 2, steps(v) ** 2 / 12)
    if precision == "int8_qk_pv":
        scales = np.abs(v).max(axis=-1) / 127
        of_values += np.einsum("hij,jhd->ihd", squared_errors_of_codes(p, scales), v ** 2)
    of_output = np.spacing(np.abs(o).astype(np.float16)).astype(np.float64) ** 2 / 12
    return (moved + of_values + of_output).sum()


class Text:
    """Antibodies as tokens, packed, every seventh residue masked."""

    def __init__(self):
        sentences = [antiberty.to_tokens(sequence) for sequence in antibodies.sequences()]
        self.masked = [sentence.copy() for sentence in sentences]
        for n, sentence in enumerate(self.masked):
            sentence[1 + 3 * n % 7:-1:7] = MASK
        self.starts = np.cumsum([0, *map(len, sentences)])
        self.spans = [slice(*ends) for ends in zip(self.starts, self.starts[1:])]
        self.residues = np.concatenate(sentences) - FIRST_RESIDUE
        self.is_residue = self.residues >= 0
        self.is_masked = np.concatenate(self.masked) == MASK

    def perplexity(self, logits):
        logits = logits[self.is_masked].astype(np.float64)
        likelihoods = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        chosen = np.take_along_axis(likelihoods, self.residues[self.is_masked][:, None], axis=-1)
        return np.exp(-chosen.mean())


def attention_here(text):
    def attend(layer, q, k, v):
        return np.concatenate([exact_attention(q[span], k[span], v[span])[0] for span in text.spans])
    return attend


class AttentionOfServer:
    """Attention of the model by sequences with this kv_dtype, with this precision, and its errors."""

    def __init__(self, text, client, kv_dtype, precision):
        self._text, self._client, self._steps = text, client, LIMITS[kv_dtype].steps
        self._precision = precision
        self._sequences = client.create_sequences(len(text.masked), LAYERS, HEADS, DIM, kv_dtype=kv_dtype)
        self.errors = []  # of O, by layer
        self.of_theory = []

    def attend(self, layer, q, k, v):
        q, k, v = (x.astype(np.float16) for x in (q, k, v))
        got = self._client.attend_batch(self._sequences, layer, q, k, v, cu_seqlens_q=self._text.starts,
                                        cu_seqlens_k=self._text.starts, precision=self._precision)
        size = error = expected = 0
        for span in self._text.spans:
            rows = [x[span].astype(np.float64) for x in (q, k, v)]
            o, p = exact_attention(*rows)
            size += (o ** 2).sum()
            error += ((got[span] - o) ** 2).sum()
            expected += expected_squared_error(*rows, o, p, self._steps, self._precision)
        self.errors.append((error / size) ** 0.5)
        self.of_theory.append((error / expected) ** 0.5)
        return got.astype(np.float32)

    def close(self):
        for sequence in self._sequences:
            sequence.delete()


@harness.stress
class KvQualityTest(harness.unittest.TestCase):
    def test_a_language_model_barely_notices_how_kv_is_stored(self):
        DOWNLOADS.mkdir(exist_ok=True)
        model = antiberty.Model(antiberty.load_weights(antiberty.download(DOWNLOADS)))
        text = Text()
        want = model.logits(text.masked, attention_here(text))
        perplexity = text.perplexity(want)
        # There are 20 residues; the mutated ones can hardly be guessed. More: the model has been read
        # wrongly.
        self.assertLess(perplexity, 3)

        with harness.Server() as server, flashcore.connect(server.target) as client:
            info = client.server_info()
            lines = [f"{len(text.masked)} antibodies, {text.is_residue.sum()} residues, "
                     f"{text.is_masked.sum()} masked; {info.devices[0].id}, {info.devices[0].name}",
                     "", "| K/V | perplexity | top-1 | error of O | of the theory |",
                     "| --- |" + " ---: |" * 4,
                     f"| float32 | {perplexity:.4f} | | | |"]
            results = {}
            for kv_dtype, precision in [way for dtype, *way in harness.ways(info, DIM) if dtype == "float16"]:
                service = AttentionOfServer(text, client, kv_dtype, precision)
                logits = model.logits(text.masked, service.attend)
                service.close()
                same = (logits.argmax(axis=-1) == want.argmax(axis=-1))[text.is_residue].mean()
                found = text.perplexity(logits)
                results[kv_dtype, precision] = found, same, service
                name = kv_dtype if precision == "16bit" else f"{kv_dtype}, {precision}"
                lines.append(
                    f"| {name} | {found:.4f} | {100 * same:.2f}% | "
                    f"{100 * min(service.errors):.3f}% to {100 * max(service.errors):.3f}% | "
                    f"{min(service.of_theory):.2f} to {max(service.of_theory):.2f} |")
        print("\n".join(lines), flush=True)

        self.assertLessEqual({("same_as_query", "16bit"), ("int8", "16bit")}, set(results))
        for (kv_dtype, precision), (found, same, service) in results.items():
            with self.subTest(kv_dtype, precision=precision):
                limits = LIMITS[kv_dtype]
                self.assertGreaterEqual(same, limits.top1)
                self.assertLess(abs(found / perplexity - 1), limits.perplexity)
                least, most = limits.theory if precision == "16bit" else THEORY_OF_CODES
                self.assertGreater(min(service.of_theory), least)
                self.assertLess(max(service.of_theory), most)


if __name__ == "__main__":
    harness.main()
