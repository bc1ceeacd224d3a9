#!/bin/bash
#SBATCH --chdir=/home/user
#SBATCH --output='/runs/a b/slurm/%A_%a.out'
#SBATCH --error='/runs/a b/slurm/%A_%a.err'
#SBATCH --open-mode=append
#SBATCH --array=0-2%3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --requeue
#SBATCH --job-name=whale-train
#SBATCH --signal=USR2@90
#SBATCH --time=60

export WHALE_TRAIN_SECRET="${WHALE_TRAIN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
command=(
    /opt/bin/python
    -m
    whale_train.launcher.slurm.task
    '--folder=/runs/a b/slurm'
    --notice=requeue
    --grace-s=90
    '--commands=/runs/a b/slurm/submission.json'
)
srun "${command[@]}"
