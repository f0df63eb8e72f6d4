"""How far outputs are from attention in float64 on the FP16 rows that were sent, for each way to store K/V.

Prints the table of kernels/KV_8BIT.md, and more rows, and compares them with it. FLASHCORE_TEST_DEVICE
chooses the device; a GPU has more products than the CPU, and rounds probabilities to 16 bits.
"""

import re

import flashcore
import numpy as np
from flashcore import _tensors

import harness

QUERIES, HEADS_OF_A_SET, DIM = 32, 4, 128  # query heads, each with a KV head
PUBLISHED_ROWS = 4096  # of K/V
OTHER_ROWS = 512, 32768
# How far results may be from the table: inputs are the same in every run, devices sum in other orders.
RELATIVE_L2, LARGEST = 0.05, 0.25
ALIKE = 0.15  # the relative L2 of all sets but the last, at OTHER_ROWS

HERE = "GPU" if harness.ON_GPU else "CPU"
WAYS = {
    f"FP16, {HERE}": ("float16", "same_as_query", "16bit"),
    f"BF16, {HERE}": ("bfloat16", "same_as_query", "16bit"),
    "INT8": ("float16", "int8", "16bit"),
    "INT8, `int8_qk`": ("float16", "int8", "int8_qk"),
    "INT8, `int8_qk_pv`": ("float16", "int8", "int8_qk_pv"),
    "E4M3": ("float16", "float8_e4m3", "16bit"),
}


def gaussian(rng, rows):
    return rng.standard_normal((rows, DIM))


def with_outliers(rng, rows):
    """Four components are 12, of either sign."""
    numbers = gaussian(rng, rows)
    numbers[:, :4] = 12 * rng.choice([-1, 1], size=(rows, 4))
    return numbers


def heavy_tailed(rng, rows):
    return rng.standard_t(3, (rows, DIM))


# Q, K and V.
SETS = {
    "Gaussian": (gaussian, gaussian, gaussian),
    "outliers in K": (gaussian, with_outliers, gaussian),
    "in V": (gaussian, gaussian, with_outliers),
    "heavy tails": (heavy_tailed, heavy_tailed, heavy_tailed),
}


def inputs(rows):
    """Q, K and V in FP16, [rows, heads, DIM]: HEADS_OF_A_SET heads of each set, the same in every run."""
    rng = np.random.default_rng(rows)
    heads = [[of(rng, n).astype(np.float16) for of, n in zip(kinds, (QUERIES, rows, rows))]
             for kinds in SETS.values() for _ in range(HEADS_OF_A_SET)]
    return [np.stack(tensors, axis=1) for tensors in zip(*heads)]


def reference(q, k, v):
    """O in float64, a head at a time."""
    heads = [slice(head, head + 1) for head in range(q.shape[1])]
    return np.concatenate([harness.reference(q[:, h], k[:, h], v[:, h])[0] for h in heads], axis=1)


def attend(client, way, *tensors):
    dtype, kv_dtype, precision = way
    q, k, v = (_tensors.from_float32(tensor.astype(np.float32), dtype) for tensor in tensors)
    with client.create_sequence(1, k.shape[1], DIM, dtype=dtype, kv_dtype=kv_dtype) as sequence:
        sequence.load(0, k, v)
        o = sequence.attend(0, q, precision=precision)
    return _tensors.to_float32(_tensors.to_host("o", o, dtype))


def errors(got, want):
    """For each set, the relative L2 error and the largest error, both over the root mean square of O."""
    shape = (QUERIES, len(SETS), HEADS_OF_A_SET * DIM)
    got, want = (x.astype(np.float64).reshape(shape) for x in (got, want))
    size = np.sqrt((want ** 2).mean(axis=(0, 2)))
    off = np.abs(got - want)
    return np.stack([np.sqrt((off ** 2).mean(axis=(0, 2))), off.max(axis=(0, 2))], axis=1) / size[:, None]


def percent(share):
    """With two digits."""
    digits = max(0, 1 - int(np.floor(np.log10(100 * share))))
    return f"{100 * share:.{digits}f}%"


def line(name, of_sets):
    cells = [f"{percent(l2)}, {percent(largest)}" for l2, largest in of_sets]
    return f"| {name} | {' | '.join(cells)} |"


def published(name):
    """The published errors of each set, as errors() returns them."""
    cell = r" ([\d.]+)%, ([\d.]+)% \|"
    found = harness.published(rf"\| {re.escape(name)} \|{cell * len(SETS)}", "kernels/KV_8BIT.md")
    return np.reshape(found, (-1, 2)) / 100


@harness.stress
class KvErrorTest(harness.unittest.TestCase):
    def test_errors_are_those_of_the_table(self):
        with harness.Server() as server, flashcore.connect(server.target) as client:
            info = client.server_info()
            print(f"{info.devices[0].id}, {info.devices[0].name}")
            kernels = harness.ways(info, DIM)
            ways = {name: way for name, way in WAYS.items() if way in kernels}
            found = {}
            for rows in (PUBLISHED_ROWS, *OTHER_ROWS):
                q, k, v = inputs(rows)
                want = reference(q, k, v)
                print(f"\n{rows} rows: relative L2 error, largest error\n| K/V, products | "
                      f"{' | '.join(SETS)} |")
                for name, way in ways.items():
                    found[name, rows] = errors(attend(client, way, q, k, v), want)
                    print(line(name, found[name, rows]), flush=True)

        everywhere = {name for name, (_, _, precision) in WAYS.items() if precision == "16bit"}
        self.assertLessEqual(everywhere, set(ways))
        for name in ways:
            with self.subTest(name):
                at_published = found[name, PUBLISHED_ROWS]
                off = np.abs(at_published / published(name) - 1)
                self.assertLess(off[:, 0].max(), RELATIVE_L2)
                self.assertLess(off[:, 1].max(), LARGEST)
                for rows in OTHER_ROWS:
                    change = found[name, rows] / at_published - 1
                    self.assertLess(np.abs(change[:-1, 0]).max(), ALIKE)


if __name__ == "__main__":
    harness.main()
