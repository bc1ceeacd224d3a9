#!/bin/bash
#SBATCH --chdir=/home/user
#SBATCH --output='/runs/a b/slurm/%j.out'
#SBATCH --error='/runs/a b/slurm/%j.err'
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --job-name=whale-train
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --exclusive

export WHALE_TRAIN_SECRET="${WHALE_TRAIN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
command=(
    /opt/bin/python
    -m
    whale_train.launcher.slurm.task
    '--folder=/runs/a b/slurm'
    --notice=ignore
    --
    seed=1
    'data.field='"'"'a b'"'"''
    launcher.kind=auto
)
srun "${command[@]}"
