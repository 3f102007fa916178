#!/usr/bin/env bash
# Data parallel over nodes by plain torchrun. Run the same line on every node, with its own NODE_RANK (0, 1, ...):
#
#   scripts/launch/torchrun.sh NODES NODE_RANK PROCESSES HEAD[:PORT] [-m MODULE] RECIPE [key=value ...]
#
# For example 2 nodes of 8 GPUs, of which the first is called node0:
#
#   node0$ scripts/launch/torchrun.sh 2 0 8 node0:29500 recipes/qwen3-8b-eagle3.yaml train.accumulation=16
#   node1$ scripts/launch/torchrun.sh 2 1 8 node0:29500 recipes/qwen3-8b-eagle3.yaml train.accumulation=16
#
# MODULE: headtrain.train, or headtrain.capture, which captures on every process of every node.
# train.accumulation is a multiple of NODES x PROCESSES. The output folder may be shared or each node's own: see
# README.md beside this file. With several network interfaces set NCCL_SOCKET_IFNAME (CPU: GLOO_SOCKET_IFNAME).
set -euo pipefail
if [ $# -lt 5 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
nodes=$1 node_rank=$2 processes=$3 head=$4
shift 4
module=headtrain.train
if [ "$1" = -m ]; then
    module=${2:?-m: expected a module, as headtrain.capture}
    shift 2
fi
export HEADTRAIN_WORLD=$((nodes * processes)) # ranks that find themselves in another number refuse to train
port=29500
case $head in *:*) port=${head##*:} ;; esac
exec "$(dirname "$0")/run.sh" torchrun --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$processes" \
    --master-addr "${head%%:*}" --master-port "$port" --max-restarts 0 -m "$module" "$@"
