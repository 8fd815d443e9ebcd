#!/usr/bin/env bash
# One run on the nodes of a Slurm job: one torchrun agent a node, which meet at the first one's address.
#   sbatch --nodes 2 --gpus-per-node 8 scripts/launch/slurm.sh --model Qwen/Qwen3-4B --env_path env.py --out /shared/runs/first
# --out must be on a file system that all nodes see. Ten minutes before the time limit the run saves and the job queues again; then, and
# after a preemption, a lost node or a second sbatch, the run resumes where it was saved. scripts/test_slurm.sh tries this on one node.
#SBATCH --job-name=rl_core
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
set -euo pipefail

# torchrun passes these on to its ranks, which save when their step is done, and kills none before that.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1 PET_SHUTDOWN_TIMEOUT=3600
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a node must not share a port.
port=$((20000 + SLURM_JOB_ID % 20000))

srun --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head_node:$port" \
    -m rl_core.train --resume "$@" &
run=$! is_out_of_time=
trap 'is_out_of_time=1; kill -USR1 "$run"' USR1 # srun passes it on to every node
trap 'kill -TERM "$run"' TERM
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # a signal ended the wait, and not the run
    code=0
    wait "$run" || code=$?
done
if [ -n "$is_out_of_time" ] && [ "$code" != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
