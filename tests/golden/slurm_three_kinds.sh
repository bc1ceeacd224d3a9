#!/bin/bash
#SBATCH --chdir=/home/user
#SBATCH --output='/runs/a b/slurm/%j.out'
#SBATCH --error='/runs/a b/slurm/%j.err'
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --job-name=whale-train
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --cpus-per-task=8
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --job-name=whale-train
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --cpus-per-task=4
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --job-name=whale-train
#SBATCH --signal=USR2@90
#SBATCH --time=60
#SBATCH --cpus-per-task=2
#SBATCH --mem=30G

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
srun --het-group=0 --cpus-per-task=8 "${command[@]}" : \
    --het-group=1 --cpus-per-task=4 "${command[@]}" : \
    --het-group=2 --cpus-per-task=2 "${command[@]}"
