#!/usr/bin/env python3
"""Asks a model with layerstream: its own chat template around the question, greedy decoding, the answer as text.

    python tools/ask.py runs/fine-tune/model "What is layerstream?" ["How do I resume a run?"]...

The model is a Hugging Face directory or a checkpoint of layerstream. Every question is a conversation of its own, or
with --chat all are turns of one. Needs tokenizers and jinja2.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tools")

from prepare_data.errors import PrepareError, RecordError  # noqa: E402
from prepare_data.hf_tokenizer import HfTokenizer  # noqa: E402
from prepare_data.json_file import read_json  # noqa: E402


class Model:
    """Throws PrepareError for a directory without tokenizer or chat template."""

    def __init__(self, program, directory, max_new_tokens):
        self._generate = [program, "generate", "--checkpoint", str(directory), "--temperature", "0"]
        self._generate += ["--max-new-tokens", str(max_new_tokens)]
        self._tokenizer = HfTokenizer(directory)
        self._template = self._tokenizer.chat_template(None, {})
        if self._template is None:
            raise PrepareError(f"{directory}: no chat template; this model continues text: layerstream generate")
        self._end_ids = end_ids(directory, self._tokenizer)

    def answer(self, messages):
        """Of the assistant, to the messages so far."""
        prompt, _ = self._tokenizer.encode(self._template.render(messages, None, add_generation_prompt=True))
        result = subprocess.run(
            [*self._generate, "--prompt-ids", ",".join(map(str, prompt))], stdout=subprocess.PIPE, text=True
        )
        if result.returncode:
            sys.exit(result.returncode)  # its message stands on stderr
        ids = [int(word) for word in result.stdout.split()]
        end = next((i for i, token_id in enumerate(ids) if token_id in self._end_ids), len(ids))
        return self._tokenizer.decode(ids[:end]).strip()


def end_ids(directory, tokenizer):
    """Ids after which the model has no more to say: one or several in generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        given = read_json(path).get("eos_token_id") if path.is_file() else None
        if given is not None:
            return set(given) if isinstance(given, list) else {given}
    return {tokenizer.id_of("eos_token")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("question", nargs="+")
    parser.add_argument("--system", help="a system message before the first question")
    parser.add_argument("--chat", action="store_true", help="the questions are turns of one conversation")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--layerstream", default=str(ROOT / "build/cpu/src/cli/layerstream"), help="the program")
    arguments = parser.parse_args()
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    try:
        model = Model(arguments.layerstream, arguments.model, arguments.max_new_tokens)
        messages = list(opening)
        for question in arguments.question:
            if not arguments.chat:
                messages = list(opening)
            messages.append({"role": "user", "content": question})
            answer = model.answer(messages)
            messages.append({"role": "assistant", "content": answer})
            print(f"> {question}\n{answer}\n", flush=True)
    except (PrepareError, RecordError) as error:
        sys.exit(f"ask: {error}")
    except OSError as error:
        sys.exit(f"ask: {error.filename}: {error.strerror}; --layerstream names the program")


if __name__ == "__main__":
    main()
