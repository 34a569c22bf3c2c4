#!/bin/bash
#SBATCH --account=my_project
#SBATCH --constraint=h100
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --job-name=clip
#SBATCH --mem=1048576M
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/home/me/project/runs/clip/launch/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --signal=B:USR2@300
#SBATCH --time=1440

# A warning may come while the site is being set up.
SEEN=; for name in TERM INT HUP USR1 USR2; do trap "SEEN=SIG$name" $name; done
cd /home/me/project || exit 1
RUN_DIR=/home/me/project/runs/clip
SCRIPT=/home/me/project/runs/clip/launch/script.sh
REQUEUE=1 TIME_SECONDS=86400 LEAD_SECONDS=300
LIMIT_PREEMPTIONS=200 LIMIT_TIMEOUTS=50 LIMIT_FAILURES=2

# ---- the site ----
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=16
export NCCL_IB_DISABLE=0
export NCCL_IB_TIMEOUT=22
export NCCL_IB_RETRY_CNT=7
export RDMAV_FORK_SAFE=1
export NCCL_SOCKET_IFNAME=ib0
export NCCL_DEBUG=WARN

# ---- how ranks start ----
JOB=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
RESTART=${SLURM_RESTART_COUNT:-0}
cancelled() {
  [ -e "$ATTEMPT/cancel" ] ||
    scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null | grep -q JobState=CANCELLED
}
put_back() {
  trap - TERM INT HUP USR1 USR2
  if [ "$REQUEUE" = 1 ]; then
    if scontrol requeue "$JOB"; then sleep 600; exit "$1"; fi
    say "Slurm does not re-queue this job: a follow-up job continues it"
  fi
  # Variables of this job are not for the next one.
  for name in $(compgen -e | grep -E '^(SLURM|SBATCH|SRUN)_'); do
    [ "$name" = SLURM_CONF ] || unset "$name"
  done
  if NEXT=$(sbatch --parsable --dependency="afterany:${JOB%_*}${JOB_INDEX:+_$JOB_INDEX}" \
      ${JOB_INDEX:+--array="$JOB_INDEX"} "$SCRIPT"); then
    event follow_up "$1" "${NEXT%%;*}${JOB_INDEX:+_$JOB_INDEX}"
  else
    finish stopped "$1" "saved, but this node may not submit: sbatch $SCRIPT continues it"
  fi
  exit "$1"
}
JOB_INDEX=${SLURM_ARRAY_TASK_ID:-}
start_ranks() {
  srun --nodes=4 \
    --ntasks=32 \
    --ntasks-per-node=8 \
    --kill-on-bad-exit=1 \
    --wait=300 \
    --unbuffered \
    --cpus-per-task=16 \
    '--container-image=nvcr.io#nvidia/pytorch:25.09-py3' \
    --container-mounts=/home/me/project:/home/me/project,/home/me/project/runs/clip/launch/code:/home/me/project/runs/clip/launch/code,/home/me/project/runs/clip:/home/me/project/runs/clip,/data:/data,/scratch:/scratch \
    --container-workdir=/home/me/project \
    --no-container-mount-home \
    --output="$ATTEMPT/rank-%t.log" \
    python -u \
    /home/me/project/runs/clip/launch/code/disco_worker.py "$RUN_DIR"
}
report() {
  /usr/bin/python3 /home/me/project/runs/clip/launch/code/disco_worker.py report "$ATTEMPT"
}

set -u
# ---- the stop protocol, the same under Slurm and on one machine --------------------------------
# A warning (signal) asks the ranks to stop through a file; they save at one step and exit 75; this
# shell puts the run back into the queue, at most as often as its limits say. Nothing here needs
# Python, and requeueing happens outside the ranks and their container.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
LAUNCH=$RUN_DIR/launch
if [ -e "$LAUNCH/withdrawn" ]; then echo "taken out of the queue: $RUN_DIR"; exit 0; fi
ATTEMPT=$LAUNCH/attempts/$(date +%Y%m%d-%H%M%S)-$JOB-$RESTART
STOP=$ATTEMPT/stop
mkdir -p "$ATTEMPT" "$LAUNCH/counters" || { echo "error: cannot write to $ATTEMPT" >&2; exit 1; }
export DISCO_ATTEMPT=$ATTEMPT DISCO_STOP_FILE=$STOP DISCO_RENDEZVOUS=$ATTEMPT/rendezvous.json
STARTED=$SECONDS

say() { printf '%s  %s\n' "$(date +%FT%T)" "$*"; }
event() { # event NAME STATUS REASON: one line of the run's history, in this order of fields
  printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$(date +%s)" "$1" "$JOB" "${2:-}" "${ATTEMPT##*/}" "${3:-}" >> "$LAUNCH/events.tsv"
}
count() { # count CAUSE: one more; prints the new number
  local file=$LAUNCH/counters/$1 n
  n=$(($(cat "$file" 2>/dev/null || echo 0) + 1)); echo $n > "$file"; echo $n
}
warned() { # the name of a signal
  [ -e "$STOP" ] || say "$1: asking the ranks to save and stop"
  [ -e "$STOP" ] || echo "$1" > "$STOP"
}
finish() { event "$1" "$2" "${3:-}"; [ "$1" = done ] || say "$1${3:+: $3}"; exit "$2"; }
again() { # again CAUSE LIMIT STATUS
  local n; n=$(count "$1")
  if [ "$n" -gt "$2" ]; then finish failed "$3" "$1: $n, the limit is $2"; fi
  say "$1: $n of at most $2; continuing from the newest complete checkpoint"
  event requeued "$3" "$1"
  put_back "$3"
}
for name in TERM INT HUP USR1 USR2; do trap "warned SIG$name" $name; done
[ -z "$SEEN" ] || warned "$SEEN"

# Slurm started this again by itself (preempted without notice, a node was lost).
if [ "$RESTART" -gt 0 ] && [ "$(tail -n 1 "$LAUNCH/events.tsv" 2>/dev/null | cut -f2)" = started ]; then
  n=$(count preemptions)
  [ "$n" -le "$LIMIT_PREEMPTIONS" ] || finish failed 1 "preemptions: $n, the limit is $LIMIT_PREEMPTIONS"
fi
event started "" "${SLURM_JOB_NODELIST:-$(hostname)}"
say "attempt $RESTART of job $JOB on ${SLURM_JOB_NODELIST:-this machine}: $RUN_DIR"

# In the background, since bash runs a trap only after a foreground command has ended; wait returns
# early on a signal, so the status travels through a file. A warning is for this shell alone.
(
  trap '' TERM INT HUP USR1 USR2
  start_ranks > "$ATTEMPT/launcher.log" 2>&1
  echo $? > "$ATTEMPT/status"
) &
RANKS=$!
while kill -0 $RANKS 2>/dev/null; do wait $RANKS; done
STATUS=$(cat "$ATTEMPT/status" 2>/dev/null || echo 1)
cat "$ATTEMPT/launcher.log"

# A rank that saved leaves this mark; the status of the launcher may be that of a rank killed while
# it was leaving.
[ -e "$ATTEMPT/saved" ] && [ "$STATUS" != 0 ] && STATUS=75
case $STATUS in
  0) finish done 0 ;;
  75)
    if grep -qs '^end' "$STOP" || cancelled; then finish stopped 75 "saved; launchers/slurm.py retry continues it"; fi
    CAUSE=preemptions
    grep -qs '^requeue' "$STOP" && CAUSE=requests
    # Slurm sends the warning of a time limit up to a minute early.
    [ $CAUSE = preemptions ] && [ $((SECONDS - STARTED)) -ge $((TIME_SECONDS - LEAD_SECONDS - 65)) ] && CAUSE=timeouts
    LIMIT=$LIMIT_PREEMPTIONS
    [ $CAUSE = timeouts ] && LIMIT=$LIMIT_TIMEOUTS
    [ $CAUSE = requests ] && LIMIT=1000000
    again $CAUSE "$LIMIT" 75 ;;
esac
if cancelled; then finish cancelled "$STATUS"; fi
report || true
if [ "$STATUS" = 2 ] || [ "$LIMIT_FAILURES" = 0 ]; then finish failed "$STATUS" "exit status $STATUS"; fi
again failures "$LIMIT_FAILURES" "$STATUS"
