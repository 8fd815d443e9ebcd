#!/usr/bin/env bash
# One run on the nodes of a Slurm job: one torchrun agent a node, which meet at the first one's address.
#   sbatch --nodes 2 --gpus-per-node 8 scripts/slurm.sh --model Qwen/Qwen3-4B --env_path env.py --out /shared/runs/first
# --out must be on a file system that all nodes see. Sent again with --resume, or requeued, it goes on where it was saved.
#SBATCH --job-name=rl_core
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a node must not share a port.
port=$((20000 + SLURM_JOB_ID % 20000))

exec srun --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head_node:$port" \
    -m rl_core.train --resume "$@"
