#!/usr/bin/env bash
# Ranks in network namespaces of their own, joined by a switch over links of limited speed.
#
#   tools/shaped_net.sh up [--ranks 4] [--rate 1gbit] [--delay 1ms]
#   tools/shaped_net.sh exec RANK COMMAND...      run a command as that rank's machine
#   tools/shaped_net.sh status                    addresses, shaping, bytes sent and received
#   tools/shaped_net.sh down
#
# Rank R has the address 10.88.0.(R+1) on the interface "uplink"; rank 0 is 10.88.0.1. Each link is
# limited in both directions. Needs root and iproute2; the delay needs the kernel's netem, the rate
# its tbf: what is missing is said, and not applied. Nothing outside the namespaces is changed.
set -euo pipefail

NAME=disco-link
SWITCH=$NAME-switch

die() { echo "shaped_net.sh: $*" >&2; exit 2; }
usage() { sed -n '2,12s/^# \{0,1\}//p' "$0"; }
spaces() { ip netns list | awk -v name="$NAME-" 'index($1, name) == 1 {print $1}'; }

shape() { # NAMESPACE DEVICE RATE DELAY
  local in_space=(ip netns exec "$1") root=(root)
  if [ "$4" != 0 ] && "${in_space[@]}" tc qdisc add dev "$2" root handle 1: netem delay "$4" limit 100000 2>/dev/null; then
    root=(parent 1: handle 2:)
  elif [ "$4" != 0 ]; then
    NO_DELAY=1
  fi
  # A burst of 10 ms: what a switch port would buffer; smaller ones starve large segments.
  "${in_space[@]}" tc qdisc add dev "$2" "${root[@]}" tbf rate "$3" burst 1250kb latency 100ms ||
    die "this kernel cannot limit a rate (tc tbf)"
}

up() {
  local ranks=2 rate=1gbit delay=1ms NO_DELAY=0
  while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || die "$1 needs a value"
    case $1 in
      --ranks) ranks=$2 ;; --rate) rate=$2 ;; --delay) delay=$2 ;;
      *) die "unknown option $1; known are --ranks, --rate, --delay" ;;
    esac
    shift 2
  done
  [[ $ranks =~ ^[0-9]+$ ]] && [ "$ranks" -ge 2 ] && [ "$ranks" -le 200 ] || die "--ranks $ranks: from 2 to 200"
  [ "$(id -u)" = 0 ] || die "network namespaces need root"
  command -v tc >/dev/null || die "tc not found: install iproute2"
  [ -z "$(spaces)" ] || die "already up: tools/shaped_net.sh down"
  trap 'down' ERR
  ip netns add "$SWITCH"
  ip -n "$SWITCH" link add bridge type bridge
  ip -n "$SWITCH" link set bridge up
  for rank in $(seq 0 $((ranks - 1))); do
    local space=$NAME-$rank
    ip netns add "$space"
    ip -n "$SWITCH" link add "port$rank" type veth peer name uplink netns "$space"
    ip -n "$SWITCH" link set "port$rank" master bridge up
    ip -n "$space" addr add "10.88.0.$((rank + 1))/24" dev uplink
    ip -n "$space" link set uplink up
    ip -n "$space" link set lo up
    shape "$space" uplink "$rate" "$delay"
    shape "$SWITCH" "port$rank" "$rate" 0
  done
  trap - ERR
  [ "$NO_DELAY" = 0 ] || { delay=0; echo "shaped_net.sh: no delay: this kernel has no netem" >&2; }
  echo "$ranks ranks, $rate, delay $delay each way"
}

down() {
  for space in $(spaces); do
    ip netns pids "$space" | xargs -r kill 2>/dev/null || true
    ip netns del "$space"
  done
}

case ${1:-} in
  up) shift; up "$@" ;;
  down) down ;;
  exec)
    shift; [ $# -ge 2 ] || die "exec RANK COMMAND..."
    space=$NAME-$1; shift
    exec ip netns exec "$space" "$@" ;;
  status)
    for space in $(spaces); do
      [ "$space" = "$SWITCH" ] && continue
      ip netns exec "$space" sh -c '
        cd /sys/class/net/uplink/statistics
        echo "$0 sent $(cat tx_bytes) received $(cat rx_bytes)"; tc qdisc show dev uplink' "$space"
    done ;;
  *) usage; exit 2 ;;
esac
