#!/usr/bin/env python3
"""Golden values of whole tiny models, from Hugging Face transformers.

    python tools/goldens/model_goldens.py --out tests/golden

Each case becomes a directory: a model as `save_pretrained` writes it (config.json, safetensors, random weights)
and expected.safetensors, whose tensors are described in tools/README.md. Same versions, same bytes.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from reference_fp64 import Fp64Mode

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.999)
EPS = 1e-8
MAX_GRAD_NORM = 1.0
IGNORED = -100

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclasses.dataclass
class Case:
    name: str
    family: str  # "Llama", "Mistral", "Qwen2", "Qwen3"
    config: dict
    # One list of document lengths per row; rows of one document are ordinary sequences.
    rows: list
    # Dtype of the checkpoint, or one dtype after the other over the tensors.
    checkpoint: tuple = (torch.float32,)
    shard_size: str = "10GB"
    with_bf16: bool = True  # also the reference of the bf16-rounded weights, and HF's bf16 error against it
    num_steps: int = 10  # of AdamW, all on the same batch
    old_spelling: bool = False  # config.json as transformers 4 wrote it


CASES = [
    Case(
        "llama_llama3",
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        rows=[[24], [24]],
        old_spelling=True,
    ),
    Case(
        "llama_biases_tied",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        rows=[[24], [24]],
        with_bf16=False,
    ),
    Case("mistral_window", "Mistral", {"sliding_window": 7}, rows=[[24], [24]], checkpoint=(torch.bfloat16,)),
    Case("qwen2_tied", "Qwen2", {"tie_word_embeddings": True}, rows=[[24], [24]], old_spelling=True),
    Case("qwen3_qk_norm", "Qwen3", {"head_dim": 12}, rows=[[24], [24]]),
    Case(
        "qwen2_bf16_sharded",
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        rows=[[24], [24], [24]],
        checkpoint=(torch.bfloat16,),
        shard_size="20KB",
    ),
    Case(
        "llama_mixed_dtypes",
        "Llama",
        {},
        rows=[[24], [24]],
        checkpoint=(torch.float32, torch.bfloat16, torch.float16),
        with_bf16=False,
        num_steps=0,
    ),
    Case(
        "llama_packed",
        "Llama",
        {"tie_word_embeddings": True},
        rows=[[15, 17], [9, 11, 12]],
        checkpoint=(torch.bfloat16,),
    ),
]


def model_class(case):
    return getattr(transformers, f"{case.family}ForCausalLM")


def make_config(case):
    config_class = getattr(transformers, f"{case.family}Config")
    config = config_class(**{**SIZES, **case.config}, attn_implementation="eager", use_cache=False)
    config.architectures = [model_class(case).__name__]
    return config


def is_matrix(tensor):
    return tensor.dim() == 2


def random_weights(case, generator):
    """Weights in fp32, by parameter name.

    Norm weights and biases are exactly representable in bf16: an engine that keeps vectors in fp32 and one that
    rounds every weight then mean the same model. No matrix element lies half-way between two bf16 numbers, so
    ties need no rule.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in model_class(case)(make_config(case)).named_parameters()}
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            scale = 0.4 if "embed_tokens" in name else shape[1] ** -0.5
            weight = noise * scale
            low_bits = weight.view(torch.int32) & 0xFFFF
            weight = torch.where(low_bits == 0x8000, weight.view(torch.int32) + 1, weight.view(torch.int32))
            weights[name] = weight.view(torch.float32)
        else:
            weight = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
            weights[name] = weight.bfloat16().float()
    return weights


def write_checkpoint(case, directory, weights):
    """Saves the model and returns its weights as a reader gets them, in fp32."""
    dtype = case.checkpoint[0]
    model = model_class(case)(make_config(case)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.save_pretrained(directory, max_shard_size=case.shard_size)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if len(case.checkpoint) > 1:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        for index, name in enumerate(sorted(tensors)):
            tensors[name] = weights[name].to(case.checkpoint[index % len(case.checkpoint)])
        save_file(tensors, path, metadata={"format": "pt"})
    if case.old_spelling:
        spell_like_transformers_4(directory / "config.json")

    stored = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored.update({name: tensor.float() for name, tensor in load_file(path).items()})
    assert sorted(stored) == sorted(weights), "the checkpoint must hold each parameter once"
    loaded, info = model_class(case).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    assert loaded.config.rope_parameters == make_config(case).rope_parameters
    return stored


def spell_like_transformers_4(path):
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.57.1"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_rows(case, generator):
    """input_ids and targets, both (B, S): targets are shifted already, none at a document's end."""
    vocab_size = SIZES["vocab_size"]
    length = sum(case.rows[0])
    input_ids = torch.randint(vocab_size, (len(case.rows), length), generator=generator)
    targets = torch.full_like(input_ids, IGNORED)
    targets[:, :-1] = input_ids[:, 1:]
    targets[torch.rand(targets.shape, generator=generator) < 0.15] = IGNORED
    targets[0, :3] = IGNORED  # a prompt
    for row, lengths in enumerate(case.rows):
        assert sum(lengths) == length
        for end in torch.tensor(lengths).cumsum(0).tolist():
            targets[row, end - 1] = IGNORED
    return input_ids, targets


def forward(case, model, input_ids):
    """Logits (B, S, V); each document is a sequence of its own."""
    logits = []
    for row, lengths in enumerate(case.rows):
        documents = input_ids[row].split(lengths)
        logits.append(torch.cat([model(input_ids=d[None]).logits[0] for d in documents]))
    return torch.stack(logits)


def loss_of(logits, targets):
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum()


def run(case, model, weights, input_ids, targets, num_steps):
    """Loss, logits, gradients, and `num_steps` AdamW steps on the same batch."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.train()
    values = {}
    logits = forward(case, model, input_ids)
    loss = loss_of(logits, targets)
    loss.backward()
    values["logits"] = logits.detach()
    values["loss"] = loss.detach()[None]
    for name, parameter in model.named_parameters():
        values[f"grad.{name}"] = parameter.grad.clone()
    if num_steps == 0:
        return values

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if is_matrix(p)], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        foreach=False,
    )
    losses, norms = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(forward(case, model, input_ids), targets)
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM, foreach=False).detach())
        optimizer.step()
    values["steps.loss"] = torch.stack(losses)
    values["steps.grad_norm"] = torch.stack(norms)
    for name, parameter in model.named_parameters():
        values[f"final.{name}"] = parameter.detach().clone()
    return values


def run_fp64(case, weights, input_ids, targets, num_steps):
    with Fp64Mode():
        model = model_class(case)(make_config(case))
        weights = {name: weight.double() for name, weight in weights.items()}
        return run(case, model, weights, input_ids, targets, num_steps)


def run_fp32(case, weights, input_ids, targets, num_steps):
    return run(case, model_class(case)(make_config(case)), weights, input_ids, targets, num_steps)


def run_bf16(case, weights, input_ids, targets):
    model = model_class(case)(make_config(case))
    # Parameters only: `model.to(bfloat16)` would round the rope frequencies too, which from_pretrained does not.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return run(case, model, weights, input_ids, targets, num_steps=0)


def error_of(value, reference):
    """(largest absolute error, error relative to the reference in the 2-norm)"""
    value, reference = value.double(), reference.double()
    difference = value - reference
    norm = reference.norm()
    relative = difference.norm() / norm if norm > 0 else difference.norm()
    return torch.stack([difference.abs().max(), relative])


def stored_reference(name, value):
    """Scalars and short series stay in double precision; tensors are rounded to fp32 once."""
    return value if name in ("loss", "steps.loss", "steps.grad_norm") else value.float()


def make_case(case, out, seed):
    generator = torch.Generator().manual_seed(seed)
    directory = out / case.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    weights = write_checkpoint(case, directory, random_weights(case, generator))
    input_ids, targets = make_rows(case, generator)

    expected = {"input_ids": input_ids.int(), "targets": targets.int()}
    for row, lengths in enumerate(case.rows):
        expected[f"document_starts.{row}"] = torch.tensor([0, *lengths[:-1]]).cumsum(0)

    exact = run_fp64(case, weights, input_ids, targets, case.num_steps)
    hf_fp32 = run_fp32(case, weights, input_ids, targets, case.num_steps)
    for name, value in exact.items():
        expected[name] = stored_reference(name, value)
        expected[f"hf_fp32_error.{name}"] = error_of(hf_fp32[name], value)
    assert case.num_steps == 0 or exact["steps.grad_norm"].min() > MAX_GRAD_NORM, "clipping must matter"

    if case.with_bf16:
        rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
        hf_bf16 = run_bf16(case, rounded, input_ids, targets)
        already_rounded = all(torch.equal(rounded[name], weights[name]) for name in weights)
        reference = exact if already_rounded else run_fp64(case, rounded, input_ids, targets, num_steps=0)
        for name, value in hf_bf16.items():
            if not already_rounded:
                expected[f"bf16.{name}"] = stored_reference(name, reference[name])
            expected[f"hf_bf16_error.{name}"] = error_of(value, reference[name])
        expected["hf_bf16.logits"] = hf_bf16["logits"]
        expected["hf_bf16.loss"] = hf_bf16["loss"].double()

    # One key: safetensors writes several in no fixed order.
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    made_by = f"tools/goldens/model_goldens.py, {versions}, seed {seed}"
    metadata = {"made_by": made_by}
    save_file({n: t.contiguous() for n, t in expected.items()}, directory / "expected.safetensors", metadata)
    for path in directory.iterdir():
        path.chmod(0o644)
    report(case, directory, expected)


def report(case, directory, expected):
    def worst(prefix):
        return max((e[1].item() for n, e in expected.items() if n.startswith(prefix)), default=float("nan"))

    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{case.name:20} {size / 1e3:6.0f} kB  loss {expected['loss'].item():.4f} "
        f"-> {expected.get('steps.loss', expected['loss'])[-1].item():.4f}  relative errors of HF: "
        f"fp32 logits {worst('hf_fp32_error.logits'):.1e} grad {worst('hf_fp32_error.grad'):.1e} "
        f"final {worst('hf_fp32_error.final'):.1e}; "
        f"bf16 logits {worst('hf_bf16_error.logits'):.1e} grad {worst('hf_bf16_error.grad'):.1e}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the case directories")
    parser.add_argument("--only", help="make this case alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for index, case in enumerate(CASES):
        if arguments.only in (None, case.name):
            make_case(case, arguments.out, seed=1000 + index)


if __name__ == "__main__":
    main()
