#!/usr/bin/env bash
# From nothing to a trained model: sets up, builds, trains a small model from scratch on the CPU, writes some
# text with it, goes on from its checkpoint, and exports it for Hugging Face.
#
#   scripts/quickstart.sh [TEXT]     a text file or a directory; default: this project's own sources
set -euo pipefail
text=
if [ $# -gt 0 ]; then
  [ -r "$1" ] || {
    echo "quickstart.sh: $1 cannot be read; give a text file or a directory of text files" >&2
    exit 2
  }
  text=$(realpath "$1")
fi
cd "$(dirname "$0")/.."
out=runs/quickstart
layerstream=build/cpu/src/cli/layerstream

say() { printf '\n== %s\n' "$*"; }

# A path as a YAML text.
quoted() {
  local path=${1//\\/\\\\}
  printf '"%s"' "${path//\"/\\\"}"
}

scripts/setup.sh
scripts/build.sh cpu layerstream
# The kernels' threads share the cores with the optimizer's: waiting must not spin.
export OMP_WAIT_POLICY=passive

run=(examples/quickstart.yaml --set "output_dir=$out")
if [ -n "$text" ]; then run+=(--set "train_file=$(quoted "$text")"); fi

say "what will be trained, on what, and in how much memory"
rm -rf "$out"
"$layerstream" inspect-data "${run[@]}"
"$layerstream" plan "${run[@]}"

say "training"
"$layerstream" train "${run[@]}"

mapfile -t checkpoints < <(find "$out" -maxdepth 1 -type d -name 'checkpoint-*[0-9]' | sort -V)
last=${checkpoints[-1]}
say "text by $last"
"$layerstream" generate --checkpoint "$last" --prompt "namespace layerstream {" \
  --max-new-tokens 300 --temperature 0.5 --seed 1

before=${checkpoints[-2]}
say "the way from $before to the end once more: a resumed run ends with the same bits"
"$layerstream" train "${run[@]}" --set "output_dir=$out/resumed" --set "resume_from_checkpoint=$before"
for file in "$last"/block-*.safetensors "$last"/trainer_state.json; do
  cmp "$file" "$out/resumed/$(basename "$last")/$(basename "$file")"
done
echo "weights, moments and trainer state are equal byte for byte"

say "export"
"$layerstream" export --checkpoint "$last" --output "$out/model"
ls -l "$out/model"
