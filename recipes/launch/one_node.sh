#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One node, by torchrun.
#
#   recipes/launch/one_node.sh DEVICES CONFIG [options of `python -m recipes fit`]
#   recipes/launch/one_node.sh 8 recipes/configs/llama31_8b_full_128k.yaml --model.lr 2e-5
#
# Resumes from the last.ckpt of the config; remove it to start again. PYTHON names the
# interpreter, if `python` is not the one.
set -euo pipefail

if [[ $# -lt 2 ]]; then
  echo "error: give the number of devices and a config: one_node.sh DEVICES CONFIG [options]" >&2
  exit 2
fi
devices=$1
config=$2
shift 2
python=${PYTHON:-python}
options=(fit --config "$config" --trainer.num_nodes 1 --trainer.devices "$devices"
  --ckpt_path last "$@")

# Check the options first: an error is then printed in one line, once.
"$python" -m recipes "${options[@]}" --print_config > /dev/null

exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$devices" \
  -m recipes "${options[@]}"
