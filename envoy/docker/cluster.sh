#!/bin/sh
# Makes one Redis Cluster of the three servers of compose.yaml, and ends when it is up. Run at every start: where they are
# one already, it tells them of each other anew, since Docker may have given them other addresses.
set -eu
nodes="redis-0 redis-1 redis-2"

for node in $nodes; do
  until [ "$(redis-cli -h "$node" ping)" = PONG ]; do sleep 1; done
done

case "$(redis-cli -h redis-0 cluster info)" in
*cluster_slots_assigned:16384*)
  for node in redis-1 redis-2; do
    set -- $(getent hosts "$node")
    redis-cli -h redis-0 cluster meet "$1" 6379
  done ;;
*)
  redis-cli --cluster create redis-0:6379 redis-1:6379 redis-2:6379 --cluster-yes ;;
esac

# A server that knows its slots, but not yet where the others are, says ok for a while all the same.
is_up() {
  case "$(redis-cli -h "$1" cluster nodes)" in *disconnected* | *noaddr* | *fail* | *handshake*) return 1 ;; esac
  case "$(redis-cli -h "$1" cluster info)" in *cluster_state:ok*) return 0 ;; *) return 1 ;; esac
}
for node in $nodes; do
  until is_up "$node"; do sleep 1; done
done
echo "the cluster is up"
