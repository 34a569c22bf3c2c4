#!/usr/bin/env bash
# A real multi-node Slurm on this one machine, for trying and testing: several slurmd, loopback only,
# no systemd, no cgroups, root or not. Nothing outside its folder changes, but for the names of the
# nodes in /etc/hosts when that is writable.
#
#   tools/local_slurm.sh up [--nodes 4] [--cpus 8] [--fake_gpus 2] [--accounting] ...
#   eval "$(tools/local_slurm.sh env)"        # SLURM_CONF for this shell
#   tools/local_slurm.sh down
#
#   --dir DIR             where it lives, at most 80 characters (default ${TMPDIR:-/tmp}/disco-slurm-UID)
#   --cpus N              CPUs that each node pretends to have
#   --fake_gpus N         GPUs per node that Slurm hands out; null devices, needs root
#   --accounting          slurmdbd on a private MariaDB, for sacct
#   --max_array_size N    Slurm's MaxArraySize (default 1001)
#   --grace_seconds N     between the warning of a preemption and the kill (default 60)
#   --no_preempt_signal   a preempted job gets SIGTERM in its steps only, as many clusters do it
#
# Debian, Ubuntu: apt-get install slurmctld slurmd slurm-client munge
# (with --accounting also slurmdbd slurm-wlm-mysql-plugin mariadb-server).
# Partitions: main (preemptible, default) and high (preempts main).
set -euo pipefail

usage() { sed -n '2,/^# Partitions/p' "$0" | sed 's/^# \{0,1\}//'; }
fail() { echo "error: $*" >&2; exit 2; }

action=${1:-}; [ $# -gt 0 ] && shift
folder=${TMPDIR:-/tmp}; folder=${folder%/}/disco-slurm-$(id -u)
nodes=4 cpus=8 fake_gpus=0 accounting=0 preempt_signal=1 max_array_size=1001 grace_seconds=60
number() { [[ ${2:-} =~ ^[0-9]+$ ]] || fail "$1 ${2:-}: must be a number"; }
while [ $# -gt 0 ]; do
  case $1 in
    --nodes) number "$@"; nodes=$2; shift 2 ;;
    --cpus) number "$@"; cpus=$2; shift 2 ;;
    --fake_gpus) number "$@"; fake_gpus=$2; shift 2 ;;
    --max_array_size) number "$@"; max_array_size=$2; shift 2 ;;
    --grace_seconds) number "$@"; grace_seconds=$2; shift 2 ;;
    --dir) folder=${2:?--dir needs a folder}; shift 2 ;;
    --accounting) accounting=1; shift ;;
    --no_preempt_signal) preempt_signal=0; shift ;;
    *) fail "unknown argument $1; see $0 help" ;;
  esac
done
export SLURM_CONF=$folder/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

mark="# $folder/slurm.conf"
host=$(hostname -s)
me=$(id -un)

check() {
  local need="slurmctld slurmd munged srun sbatch" tool
  [ "$accounting" = 1 ] && need="$need slurmdbd mariadbd mariadb-install-db sacctmgr"
  for tool in $need; do
    command -v "$tool" >/dev/null || fail "$tool not found. Debian, Ubuntu: apt-get install" \
      "slurmctld slurmd slurm-client munge$([ "$accounting" = 1 ] && echo " slurmdbd slurm-wlm-mysql-plugin mariadb-server")"
  done
  [ "$nodes" -ge 1 ] && [ "$cpus" -ge 1 ] || fail "--nodes and --cpus: at least 1"
  [ ${#folder} -le 80 ] || fail "--dir $folder: too long, a unix socket path is limited to 108 bytes"
  case $folder in *" "*) fail "--dir $folder: must not contain a space" ;; esac
  [ "$fake_gpus" = 0 ] || [ "$(id -u)" = 0 ] || fail "--fake_gpus needs root (mknod)"
  if [ -e "$folder" ]; then
    [ -f "$folder/.local-slurm" ] || fail "--dir $folder: exists and is not of this script, not wiping it"
    ! running || fail "a cluster runs in $folder already: $0 down --dir $folder"
  fi
}

running() {
  local file
  for file in "$folder"/run/*.pid; do
    [ -s "$file" ] && kill -0 "$(cat "$file")" 2>/dev/null && return 0
  done
  return 1
}

# The first port of a range in which nothing listens, so that several clusters can live side by side.
free_port() {
  local base probe
  for base in $(seq 16817 400 28817); do
    for probe in "$base" $((base + 1)) $((base + 4)); do
      (exec 3<>"/dev/tcp/127.0.0.1/$probe") 2>/dev/null && continue 2
    done
    echo "$base"; return
  done
  fail "no free ports between 16817 and 28817"
}

write_configuration() {
  # One setting per line; no value contains a space.
  tr ' ' '\n' > "$folder/slurm.conf" <<CONF
ClusterName=disco SlurmctldHost=$host(127.0.0.1) SlurmctldPort=$port SlurmUser=$me SlurmdUser=$me FirstJobId=$((1000 + RANDOM))
AuthType=auth/munge AuthInfo=socket=$folder/run/munge.socket,cred_expire=5 CredType=cred/munge
StateSaveLocation=$folder/state SlurmdSpoolDir=$folder/spool/%n SlurmctldPidFile=$folder/run/slurmctld.pid SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log SlurmdLogFile=$folder/log/slurmd-%n.log MailProg=/bin/true
MpiDefault=none MpiParams=ports=$((port + 100))-$((port + 299))
ProctrackType=proctrack/linuxproc TaskPlugin=task/none SwitchType=switch/none SlurmdParameters=config_overrides
SelectType=select/cons_tres SelectTypeParameters=CR_Core SchedulerType=sched/backfill PriorityType=priority/basic
SchedulerParameters=sched_min_interval=0,bf_interval=1,batch_sched_delay=0,sched_interval=2
PreemptType=preempt/partition_prio PreemptMode=REQUEUE JobRequeue=1 ReturnToService=2 MaxArraySize=$max_array_size
KillWait=5 MinJobAge=600 SlurmctldTimeout=30 SlurmdTimeout=30
JobAcctGatherType=jobacct_gather/linux JobAcctGatherFrequency=5 JobCompType=jobcomp/filetxt JobCompLoc=$folder/log/jobcomp.txt
CONF
  [ "$preempt_signal" = 0 ] || echo "SlurmctldParameters=preempt_send_user_signal" >> "$folder/slurm.conf"
  local gres="" i g
  if [ "$fake_gpus" -gt 0 ]; then
    echo "GresTypes=gpu" >> "$folder/slurm.conf"; gres="Gres=gpu:$fake_gpus"
    for i in $(seq "$nodes"); do
      for g in $(seq 0 $((fake_gpus - 1))); do mknod "$folder/dev/n${i}gpu$g" c 1 3; done
      echo "NodeName=n$i Name=gpu File=$folder/dev/n${i}gpu[0-$((fake_gpus - 1))]" >> "$folder/gres.conf"
    done
  fi
  for i in $(seq "$nodes"); do
    echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 3 + i)) CPUs=$cpus Boards=1" \
      "SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=20000 $gres State=UNKNOWN" >> "$folder/slurm.conf"
  done
  cat >> "$folder/slurm.conf" <<CONF
PartitionName=main Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=$grace_seconds
PartitionName=high Nodes=n[1-$nodes] Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

await() { local _; for _ in $(seq 300); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done; fail "$* did not answer in 30 s; see $folder/log"; }

start_accounting() {
  local sql="CREATE DATABASE slurm_acct;" from
  printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd AccountingStorageHost=127.0.0.1 \
    "AccountingStoragePort=$((port + 1))" "AccountingStoragePass=$folder/run/munge.socket" >> "$folder/slurm.conf"
  mariadb-install-db --no-defaults --user="$me" --datadir="$folder/db" --auth-root-authentication-method=normal \
    --skip-test-db > "$folder/log/db-install.log" 2>&1
  mariadbd --no-defaults --user="$me" --datadir="$folder/db" --socket="$folder/run/mysql.sock" \
    --pid-file="$folder/run/mariadb.pid" --bind-address=127.0.0.1 --port=$((port + 2)) --innodb-flush-log-at-trx-commit=0 \
    --innodb-buffer-pool-size=64M --innodb-log-file-size=16M --innodb-lock-wait-timeout=900 \
    --log-error="$folder/log/mariadb.log" < /dev/null > /dev/null 2>&1 & disown
  local database=(--no-defaults --socket="$folder/run/mysql.sock" -uroot)
  await mariadb-admin "${database[@]}" ping
  for from in 127.0.0.1 localhost; do
    sql="$sql CREATE USER 'slurm'@'$from' IDENTIFIED BY 'slurmtest'; GRANT ALL ON slurm_acct.* TO 'slurm'@'$from';"
  done
  mariadb "${database[@]}" -e "$sql"
  (umask 077; printf '%s\n' AuthType=auth/munge "AuthInfo=socket=$folder/run/munge.socket" DbdHost=localhost DbdAddr=127.0.0.1 \
    "DbdPort=$((port + 1))" "SlurmUser=$me" "PidFile=$folder/run/slurmdbd.pid" "LogFile=$folder/log/slurmdbd.log" \
    StorageType=accounting_storage/mysql StorageHost=127.0.0.1 "StoragePort=$((port + 2))" StorageUser=slurm \
    StoragePass=slurmtest StorageLoc=slurm_acct > "$folder/slurmdbd.conf")
  slurmdbd
  await sacctmgr -n -P list cluster
  sacctmgr -i -Q add cluster disco > /dev/null 2>&1 || true
}

name_nodes() {
  local i
  for i in $(seq "$nodes"); do
    if [ -w /etc/hosts ]; then echo "127.0.0.1 n$i $mark" >> /etc/hosts
    elif ! getent hosts "n$i" > /dev/null; then echo "note: n$i does not resolve and /etc/hosts is not writable; ranks meet by the host's name" >&2; fi
  done
}

up() {
  check
  port=$(free_port)
  rm -rf "$folder"; mkdir -p "$folder"/{run,log,state,spool,munge,db,dev}; chmod 755 "$folder"; touch "$folder/.local-slurm"
  # A half-started cluster must not stay behind.
  trap 'status=$?; [ $status = 0 ] || { tail -n 5 "$folder"/log/*.log >&2; stop_all; }' EXIT
  name_nodes
  (umask 077; dd if=/dev/urandom of="$folder/munge/munge.key" bs=1 count=128 status=none); chmod 700 "$folder/munge"
  munged --force --num-threads=2 --key-file="$folder/munge/munge.key" --socket="$folder/run/munge.socket" \
    --pid-file="$folder/run/munged.pid" --log-file="$folder/log/munged.log" --seed-file="$folder/munge/munge.seed"
  write_configuration
  if [ "$accounting" = 1 ]; then start_accounting
  else echo "AccountingStorageType=accounting_storage/none" >> "$folder/slurm.conf"; fi
  slurmctld -c
  local i; for i in $(seq "$nodes"); do slurmd -N "n$i"; done
  # sinfo shows idle nodes before they registered: only a job on all of them is proof.
  timeout 60 srun -N "$nodes" --ntasks-per-node=1 true
  echo "ready: $nodes nodes, $fake_gpus GPUs each. For this shell: export SLURM_CONF=$folder/slurm.conf"
}

# Ends the processes of these pid files together: SIGTERM, 10 s, SIGKILL.
stop() {
  local pids="" file pid alive _
  for file in "$@"; do
    [ -s "$file" ] && pid=$(cat "$file") && kill -TERM "$pid" 2>/dev/null && pids="$pids $pid"
  done
  for _ in $(seq 100); do
    alive=0; for pid in $pids; do kill -0 "$pid" 2>/dev/null && alive=1; done
    [ $alive = 0 ] && return 0; sleep 0.1
  done
  for pid in $pids; do kill -KILL "$pid" 2>/dev/null || true; done
}

stop_all() {
  set +e
  local _
  if [ -s "$folder/run/slurmctld.pid" ]; then
    timeout 10 scancel -u "$me" 2>/dev/null
    for _ in $(seq 40); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.25; done
  fi
  stop "$folder"/run/slurmd-*.pid; stop "$folder/run/slurmctld.pid"; stop "$folder/run/slurmdbd.pid"
  stop "$folder/run/mariadb.pid" "$folder/run/munged.pid"
  if [ -w /etc/hosts ] && grep -qF "$mark" /etc/hosts; then
    local rest; rest=$(grep -vF "$mark" /etc/hosts); printf '%s\n' "$rest" > /etc/hosts
  fi
}

case $action in
  up) up ;;
  down)
    [ -f "$folder/.local-slurm" ] || { echo "nothing to stop in $folder"; exit 0; }
    stop_all; rm -rf "$folder"; echo "stopped" ;;
  env) [ -f "$SLURM_CONF" ] || fail "no cluster in $folder: $0 up"; echo "export SLURM_CONF=$SLURM_CONF" ;;
  help | -h | --help) usage ;;
  *) fail "say up, down, env or help; not '$action'" ;;
esac
