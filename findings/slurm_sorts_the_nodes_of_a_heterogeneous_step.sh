#!/bin/sh
# Slurm 22.05.8 (slurm-wlm of Debian 12), seen on 2026-11-29.
#
# One expects: in a step over the components of a heterogeneous job, SLURM_STEP_NODELIST to begin with
# the node of task 0, SLURM_STEP_TASKS_PER_NODE to have the tasks of node SLURM_NODEID at that place, and
# SLURM_NTASKS_PER_NODE to be that of the task's own component.
# What happens: tasks and SLURM_NODEID follow the components. Both lists are sorted by the names of the
# nodes, so that the first node may not be task 0's, and SLURM_NTASKS_PER_NODE is that of the last
# component on every task. Who takes the rendezvous from the list waits for a host that has no rank 0.
# What to do: join SLURM_JOB_NODELIST_HET_GROUP_0, _1, ... up to SLURM_HET_SIZE, and
# SLURM_TASKS_PER_NODE_HET_GROUP_0, _1, ... likewise.
#
# Needs root, slurm-wlm 22.05.8 and munge; starts a controller and two nodes of its own.
# Exits 0 while Slurm behaves so, 1 when it no longer does.
set -eu
for tool in slurmctld slurmd munged mungekey sbatch; do
    command -v "$tool" > /dev/null || { echo "needs $tool: apt-get install slurm-wlm munge"; exit 2; }
done
case $(slurmctld -V) in
    *" 22.05.8") slurmctld -V ;;
    *) echo "seen with 22.05.8, and here is $(slurmctld -V)"; exit 2 ;;
esac
folder=$(mktemp -d)
started=""
trap 'for pid in $started; do kill "$pid" 2> /dev/null || true; done; sleep 2; rm -rf "$folder"' EXIT
mkdir -m 700 "$folder/munge" "$folder/state"
host=$(hostname -s)
munge="$folder/munge"
mungekey --create --keyfile="$munge/key"
munged --foreground --force --key-file="$munge/key" --socket="$munge/socket" \
    --pid-file="$munge/pid" --log-file="$munge/log" --seed-file="$munge/seed" > /dev/null 2>&1 &
started="$!"
cat > "$folder/slurm.conf" <<CONF
ClusterName=tried
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=16917
AuthType=auth/munge
AuthInfo=socket=$munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=apple NodeHostname=$host NodeAddr=127.0.0.1 Port=16918 CPUs=2 RealMemory=500 State=UNKNOWN
NodeName=pear NodeHostname=$host NodeAddr=127.0.0.1 Port=16919 CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=all Nodes=apple,pear Default=YES State=UP
CONF
export SLURM_CONF="$folder/slurm.conf"
slurmctld -D > /dev/null 2>&1 &
started="$! $started"
for node in apple pear; do
    slurmd -D -N "$node" > /dev/null 2>&1 &
    started="$! $started"
done
until [ "$(sinfo --noheader --states=idle --format=%D 2> /dev/null)" = 2 ]; do sleep 0.5; done

cat > "$folder/job.sh" <<'JOB'
#!/bin/bash
#SBATCH --nodelist=pear --ntasks-per-node=2
#SBATCH hetjob
#SBATCH --nodelist=apple --ntasks-per-node=1
srun --het-group=0-1 bash -c 'nodes="$SLURM_STEP_NODELIST with $SLURM_STEP_TASKS_PER_NODE tasks"
    echo "$SLURM_PROCID on $SLURMD_NODENAME, node $SLURM_NODEID of $nodes; $SLURM_NTASKS_PER_NODE"'
JOB
job=$(sbatch --parsable --output="$folder/out" "$folder/job.sh")
while squeue --noheader --jobs="$job" --format=%T | grep -q .; do sleep 0.5; done
sort "$folder/out"
grep -q '^0 on pear, node 0 of apple,pear with 1,2 tasks; 1$' "$folder/out" &&
    grep -q '^2 on apple, node 1 of apple,pear with 1,2 tasks; 1$' "$folder/out"
