"""Generates text with a model of Hugging Face transformers whose K/V is on the server.

    python generate.py Qwen/Qwen3-0.6B "The capital of France is"      # the server is $FLASHCORE_TARGET
"""

import argparse

import torch
import transformers

import flashcore.transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", help="a name on the hub, or a folder")
    parser.add_argument("prompts", nargs="+", help="generated as one batch")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--num_beams", type=int, default=1)
    args = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation=flashcore.transformers.register())
    inputs = tokenizer(args.prompts, return_tensors="pt", padding=True)
    with flashcore.transformers.FlashCoreCache(model.config) as cache:
        tokens = model.generate(**inputs, cache=cache, max_new_tokens=args.max_new_tokens,
                                num_beams=args.num_beams, do_sample=False)
    for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
        print(text)


if __name__ == "__main__":
    main()
