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

run=(examples/quickstart.yaml --set "output_dir=$out")
if [ -n "$text" ]; then run+=(--set "train_file=$(quoted "$text")"); fi

say "what will be trained, on what, and in how much memory"
rm -rf "$out"
"$layerstream" inspect-data "${run[@]}"
"$layerstream" plan "${run[@]}"

say "training"
"$layerstream" train "${run[@]}"

checkpoint=$(find "$out" -maxdepth 1 -type d -name 'checkpoint-*[0-9]' | sort -V | tail -n 1)
say "text by $checkpoint"
"$layerstream" generate --checkpoint "$checkpoint" --prompt "namespace layerstream {" \
  --max-new-tokens 300 --temperature 0.7 --seed 1

say "ten steps more from that checkpoint"
steps=${checkpoint##*-}
"$layerstream" train "${run[@]}" --set resume_from_checkpoint=auto --set "max_steps=$((steps + 10))"

say "export"
checkpoint=$(find "$out" -maxdepth 1 -type d -name 'checkpoint-*[0-9]' | sort -V | tail -n 1)
rm -rf "$out/model"
"$layerstream" export --checkpoint "$checkpoint" --output "$out/model"
ls -l "$out/model"
