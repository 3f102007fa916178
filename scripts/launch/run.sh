#!/usr/bin/env bash
# run.sh LAUNCHER ...: runs it; SIGTERM and Ctrl-C go to its ranks, which save and exit with 0, and so does this. A
# launcher of torch's that is told itself passes SIGTERM on, too, but then exits with 1.
set -uo pipefail
set -m # the launcher in a process group of its own, where a terminal's Ctrl-C does not reach it
told=
"$@" &
launcher=$!
trap 'told=1; trap "" TERM INT; pkill -TERM -P "$launcher"' TERM INT
wait "$launcher"
code=$?
if [ -n "$told" ]; then # that wait was interrupted
    wait "$launcher"
    code=$?
fi
exit "$code"
