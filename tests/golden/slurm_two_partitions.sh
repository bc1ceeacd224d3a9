#!/bin/bash
#SBATCH --chdir=/home/user
#SBATCH --output='/runs/a b/slurm/%j.out'
#SBATCH --error='/runs/a b/slurm/%j.err'
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --requeue
#SBATCH --job-name=whale-train
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --account=whale
#SBATCH --constraint=v100
#SBATCH --partition=new
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --requeue
#SBATCH --job-name=whale-train
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --account=whale
#SBATCH --constraint=fast
#SBATCH --partition=old
#SBATCH --gres=gpu:p100:8

export WHALE_TRAIN_SECRET="${WHALE_TRAIN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
command=(
    /opt/bin/python
    -m
    whale_train.launcher.slurm.task
    '--folder=/runs/a b/slurm'
    --notice=requeue
    --grace-s=90
    --
    seed=1
    'data.field='"'"'a b'"'"''
    launcher.kind=auto
)
srun --het-group=0-1 "${command[@]}"
