#!/bin/bash
# A run on Slurm, from the root of a checkout (`make run` was done there) on a file system that all nodes see:
#     sbatch cluster/slurm.sh run configs/diversifed/fmnist_dirichlet.yaml rounds=50
#     sbatch cluster/slurm.sh resume runs/RUN        # when the time was up
#SBATCH --job-name=raypfl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=0
#SBATCH --exclusive          # at the end Ray is stopped on these nodes, whoever of you started it
#SBATCH --time=04:00:00
#SBATCH --output=raypfl-%j.log
set -euo pipefail

source .venv/bin/activate
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$head:$((20000 + SLURM_JOB_ID % 10000))

# The processes of this job have the token, and nobody else.
umask 077
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/.ray-token-$SLURM_JOB_ID
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH"

# Starts a Ray node on each, waits for all of them, runs the command on the first, and stops the nodes again.
srun --kill-on-bad-exit=1 ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" -- raypfl "$@" engine.name=ray "engine.address=$address"
