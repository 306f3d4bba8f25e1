#!/usr/bin/env python3
"""A tiny random GPT-2 of the transformers library: weights as it publishes them, and logits.

    pip install torch transformers safetensors     (in a virtual environment outside the repository)
    gpt2_transformers.py DIR                       writes DIR/model.safetensors, logits.safetensors

test_gpt2.c reads the committed files in dev/ref/gpt2_transformers, so it needs none of this. The
weights are of order one, so that every tensor matters; fp32, the tanh form of gelu.
"""
import sys

import torch
import transformers
from safetensors.torch import save_file


def main(directory):
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = ".ln_" in name and "weight" in name
            p.copy_(torch.randn(p.shape) * 0.4 + (1.0 if scale else 0.0))
        inputs = torch.randint(0, 11, (2, 16))
        logits = model(inputs).logits
    model.save_pretrained(directory)
    save_file({"inputs": inputs.int(), "logits": logits.contiguous()},
              f"{directory}/logits.safetensors",
              {"script": "dev/ref/gpt2_transformers.py", "transformers": transformers.__version__,
               "torch": torch.__version__})
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: gpt2_transformers.py DIR")
    main(sys.argv[1])
