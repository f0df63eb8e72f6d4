"""Which transformers, and which of its models, flashcore.transformers works with. Imported first: an older
transformers lacks what the rest imports."""

import functools
import inspect
import re
import sys
from typing import Any

import transformers

from .errors import InvalidArgument, invalid

# transformers takes every name with "flash" in it for FlashAttention.
NAME = "fc_service"

_OLDEST, _TOO_NEW = (5, 24), (6,)
if not _OLDEST <= tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < _TOO_NEW:
    raise ImportError(f"flashcore.transformers works with transformers 5.24 and later 5.x; this is "
                      f"{transformers.__version__}: pip install 'flashcore[transformers]'")


def check_model(kind: type) -> None:
    """Refuses a class of models that computes its attention itself, whatever attn_implementation says."""
    asks = getattr(kind, "_can_set_attn_implementation", lambda: True)  # reads the source of its module
    if not asks():
        raise _refusal(kind)


def check_config(config: transformers.PreTrainedConfig) -> None:
    """The same, for the configuration of a model whose class transformers knows."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config.get_text_config(decoder=True)), None)
    if isinstance(kind, type):
        check_model(kind)
        if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[kind.__module__]):
            raise invalid("config", f"is of {kind.__name__}, which has no attention", "models with attention")


def check_at_load() -> None:
    """Makes models say when they are loaded, or set to NAME, that they do not ask the attention interface."""
    kind = transformers.PreTrainedModel
    if hasattr(kind.from_pretrained, "flashcore"):
        return
    for name in ("get_correct_attn_implementation", "set_attn_implementation"):
        setattr(kind, name, _checked(getattr(kind, name)))
    for name in ("from_pretrained", "_from_config"):
        setattr(kind, name, classmethod(_told(getattr(kind, name).__func__)))
    mixin = transformers.GenerationMixin
    setattr(mixin, name := "prepare_inputs_for_generation", _prompted(getattr(mixin, name)))


def _refusal(kind: type) -> InvalidArgument:
    return invalid("attn_implementation", f'"{NAME}" for {kind.__name__}, which does not ask transformers\' '
                   f"attention interface", '"eager" or "sdpa" for it; for a model of several parts a dict of '
                   f'theirs, such as {{"text_config": "{NAME}"}}')


def _checked(method: Any) -> Any:
    """A method of models with an implementation as its argument."""
    @functools.wraps(method)
    def call(self: Any, implementation: Any, *args: Any, **options: Any) -> Any:
        if implementation == NAME:
            check_model(type(self))
        return method(self, implementation, *args, **options)
    return call


def _told(method: Any) -> Any:
    """A class method that makes a model. Some models have a class for each implementation that they know."""
    @functools.wraps(method)
    def call(kind: type, *args: Any, **options: Any) -> Any:
        try:
            return method(kind, *args, **options)
        except KeyError as error:
            if error.args != (NAME,):
                raise
            raise _refusal(kind) from None
    call.flashcore = True  # type: ignore[attr-defined]
    return call


def _prompted(method: Any) -> Any:
    """The tokens that `generate` passes on for a step. It would take some again of those that a cache has."""
    @functools.wraps(method)
    def call(self: Any, input_ids: Any, next_sequence_length: int | None = None, cache: Any = None,
             *args: Any, **options: Any) -> Any:
        if next_sequence_length is not None and next_sequence_length <= 0 and hasattr(cache, "sequences"):
            length = cache.get_seq_length()
            raise invalid("cache", f"has {length} positions, and the prompt {next_sequence_length + length}",
                          "a prompt that goes on after them; for another prompt, reset() the cache first")
        return method(self, input_ids, next_sequence_length, cache, *args, **options)
    return call
