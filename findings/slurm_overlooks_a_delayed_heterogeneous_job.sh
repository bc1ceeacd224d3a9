#!/bin/sh
# Slurm 22.05.8 (slurm-wlm of Debian 12), seen on 2026-11-29.
#
# One expects: a heterogeneous job in the queue to start when the delay by which it was submitted is
# over and its nodes are idle, as any other job does.
# What happens: it stays PENDING, with a start of N/A, until something else changes in the queue: until
# another job is submitted or ends. Backfill alone starts such jobs, and it looks at the queue only after
# a change; that a delay is over is none. Where a cluster is quiet, that may take minutes. A job that
# `scontrol requeue` has put into the queue again is delayed as well, by the life of its credential.
# What to do: `scontrol update jobid=JOB starttime=now`, once squeue shows the start N/A with the reason
# None or BeginTime.
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
SchedulerParameters=bf_interval=1,sched_interval=1
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
#SBATCH --ntasks=1 --begin=now+5
#SBATCH hetjob
#SBATCH --ntasks=1
sleep 60
JOB
sed '/hetjob/,+1d' "$folder/job.sh" > "$folder/alone.sh"
alone=$(sbatch --parsable --output="$folder/out" "$folder/alone.sh")
sleep 15
usual=$(squeue --noheader --jobs="$alone" --format=%T)
scancel "$alone"
while squeue --noheader --jobs="$alone" --format=%T | grep -q .; do sleep 0.5; done
job=$(sbatch --parsable --output="$folder/out" "$folder/job.sh")
sleep 15
before=$(squeue --noheader --jobs="$job" --format='%T %S' | sort -u)
scontrol update "jobid=$job" starttime=now
sleep 5
after=$(squeue --noheader --jobs="$job" --format=%T | sort -u)
scancel "$job"
echo "ten seconds after the delay: $usual alone, and $before of two components; then $after"
[ "$usual" = RUNNING ] && [ "$before" = "PENDING N/A" ] && [ "$after" = RUNNING ]
