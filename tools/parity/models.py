"""Small models in the shapes of real ones, and the rows they train on. Same seeds, same bits on every machine."""

import dataclasses
import hashlib

import torch
import transformers
from safetensors.torch import save_file

SEQUENCE = 256  # tokens of a row
ROWS = 8  # of a step: all there are, so that the order in which a run visits them does not matter

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    family: str  # of transformers' class names
    config: dict
    seed: int

    @property
    def model_class(self):
        return getattr(transformers, f"{self.family}ForCausalLM")

    def model_config(self, attention="eager"):
        config_class = getattr(transformers, f"{self.family}Config")
        config = config_class(**{**SIZES, **self.config}, attn_implementation=attention, use_cache=False)
        config.architectures = [self.model_class.__name__]
        return config


CASES = [
    Case("llama", "Llama", {"rope_parameters": LLAMA3_ROPE}, seed=1),
    Case("mistral", "Mistral", {"sliding_window": 100}, seed=2),  # shorter than a row
    Case("qwen2", "Qwen2", {"tie_word_embeddings": True}, seed=3),
    Case("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, seed=4),
    Case("qwen3_d128", "Qwen3", {"head_dim": 128}, seed=5),
]


def random_weights(case):
    """FP32 weights by parameter name, of the size that training leaves: activations of order 1 in every layer.

    Norm weights and biases are representable in bf16: a run that rounds them and one that does not start from
    the same model.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in case.model_class(case.model_config()).named_parameters()}
    generator = torch.Generator().manual_seed(case.seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            weights[name] = noise * shape[1] ** -0.5
        else:
            weights[name] = (1 + 0.1 * noise if "norm" in name else 0.1 * noise).bfloat16().float()
    return weights


def random_rows(case):
    """Token ids (ROWS, SEQUENCE) int64, the logarithm of an id uniform: some tokens are frequent, most rare."""
    generator = torch.Generator().manual_seed(100 + case.seed)
    uniform = torch.rand((ROWS, SEQUENCE), generator=generator, dtype=torch.float64)
    return (SIZES["vocab_size"] ** uniform).long() - 1


def save_model(case, weights, directory):
    model = case.model_class(case.model_config()).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.save_pretrained(directory)


def save_rows(rows, path):
    """A token shard with a document per row. The last token of a row predicts nothing: 255 targets of 256."""
    offsets = torch.arange(rows.shape[0] + 1, dtype=torch.int64) * rows.shape[1]
    save_file({"input_ids": rows.flatten().int(), "document_offsets": offsets}, path)


def digest(weights, rows):
    """Of what a run starts from, to tell whether two runs may be compared."""
    hashed = hashlib.sha256()
    for name in sorted(weights):
        hashed.update(name.encode() + weights[name].numpy().tobytes())
    hashed.update(rows.numpy().tobytes())
    return hashed.hexdigest()[:16]
