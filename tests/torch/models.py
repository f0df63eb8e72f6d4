"""Small models with random weights, and a twin of the service's attention that runs here.

The twin rounds Q, K and V to the dtype of the service and computes in float32, as the service does.
"""

import pathlib
import sys

NO_TORCH = 77  # the exit status that ctest takes for skipped
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
try:
    import torch
    import transformers
    from transformers.masking_utils import sdpa_mask

    import harness
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        raise ImportError(f"transformers {transformers.__version__}; the package needs 5.24")
except ImportError as error:
    print(f"skipped: {sys.executable}: {error}; set FLASHCORE_TORCH_PYTHON")
    sys.exit(NO_TORCH)

import flashcore  # noqa: E402
import flashcore.torch  # noqa: E402
import flashcore.transformers  # noqa: E402

__all__ = ["flashcore", "harness"]
TWIN = "local_twin"
VOCABULARY = 211


def twin_attention(module, query, key, value, attention_mask, scaling=None, **_):
    q, k, v = (x.to(query.dtype).float() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scaling or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~attention_mask, float("-inf"))
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1))
    return (weights @ v).to(query.dtype).transpose(1, 2), None


def twin_mask(*args, **kwargs):
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


transformers.AttentionInterface.register(TWIN, twin_attention)
transformers.AttentionMaskInterface.register(TWIN, twin_mask)


def causal_model(kind, seed=1, dtype=torch.float16, **changes):
    """A causal model of 2 layers, 4 heads and 2 K/V heads of 32, in eval mode."""
    config = getattr(transformers, f"{kind}Config")(**{**dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0), **changes})
    torch.manual_seed(seed)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def encoder(dtype=torch.float16):
    """A BERT of MiniLM's shape."""
    config = transformers.BertConfig(vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=6,
                                     num_attention_heads=12, intermediate_size=1536)
    torch.manual_seed(2)
    return transformers.BertModel(config, add_pooling_layer=False).to(dtype).eval()


def prompts(*lengths, seed=3):
    """Random tokens of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(rows, side="left"):
    """input_ids and attention_mask [batch, longest]."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        place = slice(longest - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, place] = tokens
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}
