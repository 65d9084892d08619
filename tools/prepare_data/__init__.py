"""Turns datasets into token shards for layerstream, with Hugging Face tokenizers and chat templates."""
