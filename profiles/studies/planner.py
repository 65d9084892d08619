"""`layerstream plan` as a function: models by shape, profiles by name or file."""

import json
import subprocess
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import plan_output
from direct_access import Shape
from plan_output import LongestRow, Plan, Refusal
from scaled_profile import Profile

Outcome = Union[Plan, Refusal]

ROW = 1024  # tokens


def model_config(shape: Shape, layers: int) -> str:
    """A config.json: Qwen2's, or Llama's for 8B and 70B; head and embedding are two matrices."""
    llama = shape.name in ("8B", "70B")
    return (
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM" if llama else "Qwen2ForCausalLM"],
                "model_type": "llama" if llama else "qwen2",
                "vocab_size": shape.vocabulary,
                "hidden_size": shape.hidden,
                "intermediate_size": shape.intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": shape.query_heads,
                "num_key_value_heads": shape.key_value_heads,
                "hidden_act": "silu",
                "max_position_embeddings": 131072,
                "rope_theta": 500000.0 if llama else 1000000.0,
                "rms_norm_eps": 1e-05 if llama else 1e-06,
                "initializer_range": 0.02,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
            },
            indent=2,
        )
        + "\n"
    )


def run_plan(program: Path, run: Path, keys: Dict[str, Any], options: Sequence[str] = (), parse=plan_output.parse):
    """`layerstream plan` of a run's file, with keys set: what `parse` makes of standard output, or a Refusal. Throws as
    Planner does."""
    command = [str(program), "plan", str(run), *options]
    command += [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return parse(done.stdout)
    return plan_output.parse_refusal(done.returncode, done.stderr)


class Planner:
    """`layerstream plan`, with files in `output`. Throws UnexpectedOutput where a plan fails but for memory, OSError
    where there is no such program."""

    def __init__(self, program: Path, output: Path):
        self.program, self.output = program, output
        self.num_plans = 0
        self._run = output / "run.yaml"
        output.mkdir(parents=True, exist_ok=True)
        self._run.write_text(f"compute_dtype: bf16\ncutoff_len: {ROW}\ngradient_accumulation_steps: 1\n")

    def profile_file(self, profile: Profile, name: str) -> Path:
        path = self.output / f"{name}.yaml"
        path.write_text(profile.text)
        return path

    def plan(
        self,
        shape: Shape,
        tokens: int,
        backend: str,
        profile: Union[str, Path],
        settings: Optional[Dict[str, str]] = None,
        layers: Optional[int] = None,
    ) -> Outcome:
        keys = {
            "config_name": self._model_file(shape, layers or shape.layers),
            "per_device_train_batch_size": tokens // ROW,
            "hardware_profile": profile,
            "backend": backend,
            **(settings or {}),
        }
        return self._run_plan(keys, (), plan_output.parse)

    def longest_row(self, shape: Shape, profile: Union[str, Path]) -> Union[LongestRow, Refusal]:
        """One row a step, with the backend that the machine is for."""
        keys = {"config_name": self._model_file(shape, shape.layers), "hardware_profile": profile}
        keys["per_device_train_batch_size"] = 1
        return self._run_plan(keys, ("--max-seq",), plan_output.parse_longest_row)

    def _model_file(self, shape: Shape, layers: int) -> Path:
        model = self.output / "models" / f"{shape.name.lower()}-{layers}-layers" / "config.json"
        if not model.exists():
            model.parent.mkdir(parents=True, exist_ok=True)
            model.write_text(model_config(shape, layers))
        return model

    def _run_plan(self, keys: Dict[str, Any], options: Sequence[str], parse):
        self.num_plans += 1
        return run_plan(self.program, self._run, keys, options, parse)

    def most_layers(
        self, shape: Shape, tokens: int, profile: str, ways: Sequence[Dict[str, str]]
    ) -> Tuple[int, Optional[Plan]]:
        """How many of its decoder layers fit in one of the ways, with that plan; none: not one."""
        fits, too_many = (0, None), shape.layers + 1
        while too_many - fits[0] > 1:
            middle = (fits[0] + too_many) // 2
            outcomes = (self.plan(shape, tokens, "coherent", profile, way, middle) for way in ways)
            plan = next((outcome for outcome in outcomes if isinstance(outcome, Plan)), None)
            if plan is None:
                too_many = middle
            else:
                fits = (middle, plan)
        return fits
