"""Runs of the program on a model that trains in milliseconds."""

import json
import random
import subprocess
import sys

WORDS = "the layer streams its weights to a slot and then forgets them".split()


class Training:
    """A model's configuration, text and a run's configuration in `folder`."""

    def __init__(self, program, folder):
        self.program = program
        self.folder = folder
        self.held_out = folder / "held-out.txt"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({
            "model_type": "qwen3", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 256, "initializer_range": 0.1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "tie_word_embeddings": True, "torch_dtype": "float32"}))
        chance = random.Random(1)
        for name, words in (("train", 3000), ("held-out", 300)):
            (folder / f"{name}.txt").write_text(" ".join(chance.choice(WORDS) for _ in range(words)))
        (folder / "run.yaml").write_text(json.dumps({  # JSON is YAML
            "config_name": str(folder / "model"), "train_file": [str(folder / "train.txt")],
            "cutoff_len": 64, "output_dir": str(folder / "out"),
            "per_device_train_batch_size": 2, "compute_dtype": "fp32", "learning_rate": 0.01, "warmup_steps": 5,
            "logging_steps": 1000, "save_steps": 0, "numa": "off"}))

    def call(self, *arguments):
        """Standard output of the program, which is to succeed."""
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, arguments))}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    def train(self, name, **keys):
        """A run into the folder `name`, which is returned."""
        keys["output_dir"] = self.folder / name
        settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        self.call("train", self.folder / "run.yaml", *settings)
        return keys["output_dir"]


def metrics(run):
    """The lines of metrics.jsonl: those of steps, and those of evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]
