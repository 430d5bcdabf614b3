#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Several nodes, by torchrun: run the same line on each of them.
#
#   recipes/launch/several_nodes.sh NODES DEVICES HOST[:PORT] CONFIG [options of `recipes fit`]
#   recipes/launch/several_nodes.sh 4 8 node0 recipes/configs/llama31_70b_lora_512k.yaml
#
# HOST is one of the nodes, the same on all: they find each other there (port 29500 if none is
# given). Ranks are numbered node by node, so that context ranks are neighbours. All nodes
# must see the same folders. NODES may be a range, 2:4: with PET_MAX_RESTARTS=3 the run goes on with
# the nodes that are there, when one fails or joins (docs/multi-node.md). Resumes from the last.ckpt
# of the config; to start again, remove it. PYTHON names the interpreter, if `python` is not the one.
set -euo pipefail

if [[ $# -lt 4 ]]; then
  echo "error: give the numbers of nodes and of devices per node, a host and a config:" \
    "several_nodes.sh NODES DEVICES HOST[:PORT] CONFIG [options]" >&2
  exit 2
fi
nodes=$1
devices=$2
endpoint=$3
config=$4
shift 4
python=${PYTHON:-python}
[[ $endpoint == *:* ]] || endpoint="$endpoint:29500"
options=(fit --config "$config" --trainer.num_nodes "${nodes#*:}" --trainer.devices "$devices"
  --ckpt_path last "$@")

# Check the options first: an error is then printed in one line, once per node.
"$python" -m recipes "${options[@]}" --print_config > /dev/null

program=(-m recipes "${options[@]}")
if [[ $nodes == *:* ]]; then
  # torchrun knows how many nodes there are, whenever it starts processes.
  # shellcheck disable=SC2016
  program=(--no-python bash -c 'exec "$0" -m recipes "$@" --trainer.num_nodes "$GROUP_WORLD_SIZE"'
    "$python" "${options[@]}")
fi
if [[ $nodes == *:* || ${PET_MAX_RESTARTS:-0} != 0 ]]; then
  # Otherwise torchrun (2.13) keeps the address of the first rank 0, but a new node that becomes
  # rank 0 gives its own: processes wait for each other at two places.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi
exec "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$devices" \
  --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$(basename "$config" .yaml)" \
  "${program[@]}"
