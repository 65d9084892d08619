"""What transformers makes of a tokenizer.json for its class LlamaTokenizer.

Llama 2's kind of model names that class, and transformers 5 then takes vocabulary, merges and tokens from the file but
not how text is cut: whether a token after a special one begins with a space depends on `legacy`, not on the file.
"""

from __future__ import annotations

import json

# Models for which transformers 5 trusts the file whatever class they name.
_TRUSTED_MODEL_TYPES = {"mistral", "mixtral", "phi3", "phimoe"}


def apply_llama_class(description: dict, config: dict, model_config: dict) -> None:
    """Changes tokenizer.json's `description` if transformers would read it as its LlamaTokenizer. The others are
    tokenizer_config.json and the model's config.json."""
    name = config.get("tokenizer_class") or model_config.get("tokenizer_class") or ""
    if name.removesuffix("Fast") != "LlamaTokenizer" or model_config.get("model_type") in _TRUSTED_MODEL_TYPES:
        return
    if '"ByteLevel"' in json.dumps(description.get("pre_tokenizer")):  # Llama 3's kind under Llama 2's name
        return
    if config.get("add_prefix_space") is False:
        scheme = "never"
    else:
        scheme = "always" if config.get("legacy") else "first"
    description["normalizer"] = None
    description["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": scheme,
        "split": False,
    }
