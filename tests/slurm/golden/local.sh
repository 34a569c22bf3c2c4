#!/bin/bash
# A warning may come while the site is being set up.
SEEN=; for name in TERM INT HUP USR1 USR2; do trap "SEEN=SIG$name" $name; done
cd /home/me/project || exit 1
RUN_DIR=/home/me/project/runs/clip
SCRIPT=/home/me/project/runs/clip/launch/script.sh
REQUEUE=1 TIME_SECONDS=1000000000 LEAD_SECONDS=120
LIMIT_PREEMPTIONS=100 LIMIT_TIMEOUTS=100 LIMIT_FAILURES=0

# ---- the site ----
export PYTHONUNBUFFERED=1

# ---- how ranks start ----
export DISCO_JOB=${DISCO_JOB:-local-$$} DISCO_RESTART=${DISCO_RESTART:-0}
JOB=$DISCO_JOB RESTART=$DISCO_RESTART
cancelled() { [ -e "$ATTEMPT/cancel" ]; }
put_back() {
  trap - TERM INT HUP USR1 USR2
  DISCO_RESTART=$((RESTART + 1)) exec bash "$SCRIPT"
}
start_ranks() {
  /usr/bin/python3 /home/me/project/runs/clip/launch/code/disco_worker.py spawn 1 2 "$RUN_DIR"
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
