#!/bin/sh
# Slurm 22.05.8 (slurm-wlm of Debian 12), seen on 2026-11-29.
#
# One expects: `scancel --signal=USR2 JOB` to signal the job's steps, or to say that there is none;
# and to refuse a job that still waits in the queue.
# What happens: for a running batch job whose script has not started a step yet it exits 0 without a
# word, and nobody gets the signal, neither the script nor the step that begins later. For a job in
# the queue it neither signals nor refuses: it has not returned after 15 seconds, and says nothing.
# What to do: repeat the signal until the job has ended, and have tasks heed it once. Name the state
# (`scancel --state=RUNNING --signal=USR2 JOB`), and `scancel --state=PENDING JOB` for one that waits.
#
# Needs root, slurm-wlm 22.05.8 and munge; starts a controller and a node of its own.
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
SlurmdPort=16918
AuthType=auth/munge
AuthInfo=socket=$munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES State=UP
CONF
export SLURM_CONF="$folder/slurm.conf"
slurmctld -D > /dev/null 2>&1 &
started="$! $started"
slurmd -D -N "$host" > /dev/null 2>&1 &
started="$! $started"
until [ "$(sinfo --noheader --states=idle --format=%D 2> /dev/null)" = 1 ]; do sleep 0.5; done

cat > "$folder/job.sh" <<'JOB'
#!/bin/bash
trap 'echo the script heard' USR2
sleep 4
srun bash -c 'trap "echo the step heard" USR2; for i in 1 2 3; do sleep 1; done; echo done'
JOB
job=$(sbatch --parsable --output="$folder/out" "$folder/job.sh")
until [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; do sleep 0.2; done
scancel --signal=USR2 "$job" && early="exit 0" || early="exit $?"
while squeue --noheader --jobs="$job" --format=%T | grep -q .; do sleep 0.5; done
echo "before the step: $early; what was heard: $(grep heard "$folder/out" || echo nothing)"
held=$(sbatch --parsable --hold --output="$folder/held" "$folder/job.sh")
timeout 15 scancel --signal=USR2 "$held" && late="exit 0" || late="exit $?"
state=$(squeue --noheader --jobs="$held" --format=%T)
scancel "$held"
echo "in the queue: $late (124: not back after 15 s); its state: $state"
[ "$early" = "exit 0" ] && ! grep -q heard "$folder/out" && grep -q done "$folder/out" &&
    [ "$late" = "exit 124" ] && [ "$state" = PENDING ]
