#!/usr/bin/env bash
# A Slurm of this machine alone, to try the profile beside it: in one folder, without systemd, /etc or accounting.
#
#   apt-get install slurmctld slurmd slurm-client munge
#   profiles/slurm/one_node.sh start FOLDER [NODES]
#   profiles/slurm/one_node.sh stop FOLDER
#
# NODES (1): several are all this machine. They are declared to have the processors, the memory and the GPUs that the
# profile asks for, whatever there is; the GPUs are empty files.
set -euo pipefail
umask 077

usage() { sed -n '4,6s/^#   //p' "$0" >&2; exit 2; }
fail() { echo "one_node.sh: error: $*" >&2; exit 1; }

[[ $# -ge 2 && $# -le 3 && $1 =~ ^(start|stop)$ ]] || usage
[[ ${3:-1} =~ ^[1-9]$ ]] || fail "NODES must be a number from 1 to 9, not ${3:-}"
command=$1 nodes=${3:-1}
PATH=$PATH:/usr/sbin
mkdir -p "$2"
folder=$(cd "$2" && pwd -P)
[[ $folder =~ ^[A-Za-z0-9/._+-]+$ ]] || fail "slurm.conf cannot name the folder $folder: take letters, digits and . _ + -"
export SLURM_CONF=$folder/slurm.conf

stop() {
  local pid_file pid tenth
  scancel --user="$(id -un)" 2>/dev/null || true
  for pid_file in "$folder"/node*.pid "$folder/slurmctld.pid" "$folder/munged.pid"; do  # munged last: the others need it
    pid=$(cat "$pid_file" 2>/dev/null) && kill "$pid" 2>/dev/null || continue
    for ((tenth = 0; tenth < 100; tenth++)); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
  done
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

write_configuration() {
  local user name first
  user=$(id -un) name=$(hostname -s)
  cat >"$SLURM_CONF" <<END
ClusterName=one_node
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$(free_port)
AuthType=auth/munge
# A job that is put back into the queue starts again after so many seconds; the default is 120.
AuthInfo=socket=$folder/munge.socket,cred_expire=10
SlurmUser=$user
SlurmdUser=$user
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
# No cgroups, which a container may not have. Without accounting, squeue remembers the jobs.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MinJobAge=3600
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=0
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
  for ((node = 1; node <= nodes; node++)); do
    echo "NodeName=node$node NodeHostname=$name NodeAddr=127.0.0.1 Port=$(free_port) CPUs=16 RealMemory=64000 Gres=gpu:8"
  done >>"$SLURM_CONF"
  touch "$folder"/gpu{0..7}
  # Snakemake's jobs lose the variables SLURM_*, and srun would look for its configuration in /etc.
  mkdir -p "$folder/bin"
  printf '#!/bin/sh\nSLURM_CONF=%q exec %q "$@"\n' "$SLURM_CONF" "$(command -v srun)" >"$folder/bin/srun"
  chmod +x "$folder/bin/srun"
  echo "NodeName=node[1-$nodes] Name=gpu File=$folder/gpu[0-7]" >"$folder/gres.conf"
}

start() {
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || fail "there is no $program: apt-get install slurmctld slurmd slurm-client munge"
  done
  [[ ! -e $folder/munged.pid ]] || ! kill -0 "$(cat "$folder/munged.pid")" 2>/dev/null || fail "Slurm runs in $folder already"
  rm -rf "$folder/state" "$folder"/munge.key
  mkdir -p "$folder/state"
  write_configuration
  head -c 128 /dev/urandom >"$folder/munge.key"
  munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --seed-file="$folder/munge.seed" --log-file="$folder/munged.log" 2>>"$folder/munged.log"
  slurmctld
  for ((node = 1; node <= nodes; node++)); do
    mkdir -p "$folder/node$node"
    slurmd -N "node$node"
  done
  for ((second = 0; second < 30; second++)); do
    [[ $(sinfo --noheader --Node --format=%T 2>/dev/null | sort | uniq -c | xargs) != "$nodes idle" ]] || break
    sleep 1
  done
  ((second < 30)) || { stop; fail "the nodes did not come up within 30 s: see $folder/*.log"; }
  echo "export SLURM_CONF=$SLURM_CONF PATH=$folder/bin:\$PATH"
}

"$command"
