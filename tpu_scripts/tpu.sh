#!/usr/bin/env bash
# tpu_scripts/tpu.sh [--dry-run] COMMAND: a run on Cloud TPU slices, from their creation to its end.
#
#   create                        ask for the slices as queued resources, wait for the trainer's
#   install                       this checkout and its dependencies, on all hosts of the trainer's slice
#   start CONFIG [key=value ...]  the run on all hosts; it resumes where an earlier start ended
#   samplers                      create, install and start what is missing of the samplers' slices, once
#   status                        the slices' states, and the run's on each host
#   logs [HOST] [NUMBER]          follow a host's output (default 0: only host 0 reports the run), of the
#                                 trainer or of the sampler of that number
#   stop                          SIGTERM: the run saves and ends, then the samplers
#   supervise CONFIG [...]        all of these, again after each preemption, until the run is done
#   delete                        the slices and their requests
#
# Settings come from the environment:
#   TPU_NAME ZONE ACCELERATOR RUNTIME   required: a name, and such as us-east5-b, v6e-16, v2-alpha-tpuv6e
#   SAMPLERS=N                          samplers on slices of their own, TPU_NAME-sampler-1 to -N; without it on
#                                       the trainer's hosts, on half of their chips (one host; v4 and v5p: any)
#   SAMPLER_ACCELERATOR SAMPLER_RUNTIME SAMPLER_ZONE   default: the trainer's
#   SAMPLER_SPOT=1                      set it empty for slices that are not preempted
#   JAXRL_ASYNC_SECRET                  with SAMPLERS: the secret by which they join; the same at every start
#   PROJECT                             default: gcloud's own
#   SPOT=1                              cheaper, but may be preempted
#   RUNS                                gs://BUCKET, mounted with gcsfuse, or a folder that all hosts share
#   POLL_S=30 MAX_FAILURES=3            supervise: seconds between two checks, failures before it gives up
set -euo pipefail

readonly UNIT=jaxrl_async FOLDER=jaxrl_async PREEMPTED=75 PORT=8483
here=$(cd "$(dirname "$0")/.." && pwd)

usage() { sed -n '2,/^set -euo/{s/^# \{0,1\}//;/^set -euo/d;p}' "$0"; }
fail() { printf 'tpu.sh: %s\n' "$*" >&2; exit 2; }

dry_run=
if [[ ${1-} == --dry-run ]]; then dry_run=1; shift; fi
command=${1-}
[[ -n $command && $command != --help && $command != -h ]] || { usage; exit 0; }
shift

gc() {  # run a gcloud command with this slice's zone and project
    local where=(--zone "$ZONE")
    [[ -z ${PROJECT-} ]] || where+=(--project "$PROJECT")
    if [[ -n $dry_run ]]; then
        printf '%q ' gcloud compute tpus "$@" "${where[@]}"; echo
    else
        gcloud compute tpus "$@" "${where[@]}"
    fi
}

as_sampler() {  # run a command on the slice of the sampler of this number
    local TPU_NAME=$TPU_NAME-sampler-$1 ZONE=${SAMPLER_ZONE:-$ZONE} SPOT=${SAMPLER_SPOT-1}
    local ACCELERATOR=${SAMPLER_ACCELERATOR:-${ACCELERATOR-}} RUNTIME=${SAMPLER_RUNTIME:-${RUNTIME-}}
    shift
    "$@"
}

each_sampler() {  # run a command on every sampler's slice
    local number
    for ((number = 1; number <= ${SAMPLERS:-0}; number++)); do as_sampler "$number" "$@"; done
}

on_hosts() { gc tpu-vm ssh "$TPU_NAME" --worker "$1" --command "$2"; }

state() {  # print the slice's state: ACTIVE, ...; NONE: there is no slice, UNKNOWN: gcloud failed otherwise
    local output
    if output=$(gc queued-resources describe "$TPU_NAME" --format 'value(state.state)' 2>&1); then
        tail -n 1 <<<"$output"
    elif [[ $output == *NOT_FOUND* ]]; then
        echo NONE
    else
        echo "$output" >&2
        echo UNKNOWN
    fi
}

request() {
    : "${ACCELERATOR:?set it to the slice, such as v6e-16}" "${RUNTIME:?set it to the VM image, such as v2-alpha-tpuv6e}"
    local spot=()
    [[ -z ${SPOT-} ]] || spot=(--spot)
    gc queued-resources create "$TPU_NAME" --node-id "$TPU_NAME" --accelerator-type "$ACCELERATOR" \
        --runtime-version "$RUNTIME" "${spot[@]}"
}

create() {
    request
    each_sampler request
    [[ -n $dry_run ]] || wait_for_slice
}

wait_for_slice() {
    local now before=
    while now=$(state); [[ $now != ACTIVE ]]; do
        case $now in
            NONE | FAILED | SUSPENDED | SUSPENDING | DELETING)
                echo "the request for $TPU_NAME is $now: run tpu.sh delete, then try again, perhaps in another zone" >&2
                return 1 ;;
        esac
        [[ $now == "$before" ]] || echo "$TPU_NAME: $now"
        before=$now
        sleep "${POLL_S:-30}"
    done
    echo "$TPU_NAME: ACTIVE"
}

packed() {  # write this checkout, without the files that git ignores (environments, runs), to a tar file
    if git -C "$here" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git -C "$here" ls-files -z --cached --others --exclude-standard |
            while IFS= read -r -d '' file; do [[ ! -e $here/$file ]] || printf '%s\0' "$file"; done |
            tar -C "$here" --null --files-from - -czf "$1"
    else
        tar -C "$here" -czf "$1" --exclude '.*venv' --exclude ./runs .
    fi
}

install() {
    local archive
    archive=$(mktemp --suffix=.tar.gz)
    # shellcheck disable=SC2064  # expand the name now
    trap "rm -f '$archive'" EXIT
    packed "$archive"
    gc tpu-vm scp "$archive" "$TPU_NAME:$FOLDER.tar.gz" --worker all
    on_hosts all "set -eu
        rm -rf $FOLDER && mkdir $FOLDER && tar -C $FOLDER -xzf $FOLDER.tar.gz
        python3 -m pip install --user --quiet uv
        cd $FOLDER && ~/.local/bin/uv venv --quiet --python 3.12 .venv
        ~/.local/bin/uv pip install --quiet --python .venv/bin/python -c constraints-3.12.txt -e '.[tpu]'"
    if [[ ${RUNS-} == gs://* ]]; then
        on_hosts all "set -eu
            command -v gcsfuse >/dev/null || {
                echo 'deb https://packages.cloud.google.com/apt gcsfuse-'\$(lsb_release -cs)' main' | sudo tee /etc/apt/sources.list.d/gcsfuse.list
                curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /etc/apt/trusted.gpg.d/gcsfuse.asc
                sudo apt-get update -qq && sudo apt-get install -qqy gcsfuse; }
            mkdir -p ~/runs && { mountpoint -q ~/runs || gcsfuse --implicit-dirs --rename-dir-limit 100000 ${RUNS#gs://} ~/runs; }"
    fi
}

address() {  # print the internal address of the trainer's first host, at which samplers join
    if [[ -n $dry_run ]]; then echo "ADDRESS:$PORT"; return; fi
    local ip
    ip=$(gc tpu-vm describe "$TPU_NAME" --format 'value(networkEndpoints[0].ipAddress)' | tail -n 1)
    [[ -n $ip ]] || { echo "$TPU_NAME has no address" >&2; return 1; }
    echo "$ip:$PORT"
}

needs_secret() {
    [[ -n ${JAXRL_ASYNC_SECRET-} ]] || fail "samplers join with a secret: export JAXRL_ASYNC_SECRET=\$(openssl rand -hex 32)"
}

send_secret() {  # in a file, since command lines can be read by others
    [[ -n ${SAMPLERS-} ]] || return 0
    local file
    file=$(mktemp)
    printf 'JAXRL_ASYNC_SECRET=%s\n' "$JAXRL_ASYNC_SECRET" >"$file"
    if gc tpu-vm scp "$file" "$TPU_NAME:$FOLDER.env" --worker all; then rm -f "$file"; else rm -f "$file"; return 1; fi
}

run_unit() {  # run_on_host.sh with these words (quoted for a shell) on all hosts, as a systemd unit
    send_secret
    on_hosts all "set -eu
        sudo systemctl stop $UNIT 2>/dev/null || true; sudo systemctl reset-failed $UNIT 2>/dev/null || true
        sudo systemd-run --quiet --unit=$UNIT --uid=\$(id -u) --gid=\$(id -g) --working-directory=\$HOME/$FOLDER \\
            --property=RemainAfterExit=yes --property=KillMode=mixed --property=TimeoutStopSec=60 --setenv=HOME=\$HOME \\
            --property=EnvironmentFile=-\$HOME/$FOLDER.env \$HOME/$FOLDER/tpu_scripts/run_on_host.sh $1"
}

start() {
    (($#)) || fail "start needs a configuration: tpu.sh start CONFIG [section.key=value ...]"
    local runs="\$HOME/runs" words role='' join
    [[ -z ${RUNS-} || $RUNS == gs://* ]] || runs=$(printf %q "$RUNS")
    words=$(printf '%q ' "$@")
    if [[ -n ${SAMPLERS-} ]]; then
        join=$(address)
        role="--trainer $PORT "
        words+="remote.advertise=${join%:*} mesh.samplers=$SAMPLERS "
    fi
    run_unit "$role${words}run.dir=$runs run.resume_or_start=true run.overwrite=false"
}

tend_sampler() {  # bring the sampler whose slice this is one step nearer to work; $1: what it joins
    local now lines
    now=$(state)
    case $now in
        NONE) request ;;
        SUSPENDED | SUSPENDING | FAILED)
            echo "$TPU_NAME was preempted: asking for another slice"
            delete_slice && request ;;
        ACTIVE)
            lines=$(run_states) || return 0  # not reachable yet, or no more
            case $(verdict <<<"$lines") in
                running) ;;
                gone) echo "$TPU_NAME: new"; install && run_unit "--sampler $1" ;;
                *) echo "$TPU_NAME: its sampler ended; starting it again"; run_unit "--sampler $1" ;;
            esac ;;
    esac
}

samplers() {  # what fails for one of them is tried again at the next call
    [[ -n ${SAMPLERS-} ]] || return 0
    local join number
    join=$(address) || return 0
    for ((number = 1; number <= SAMPLERS; number++)); do
        if [[ -n $dry_run ]]; then
            as_sampler "$number" request
            as_sampler "$number" install
            as_sampler "$number" run_unit "--sampler $join"
        else
            (as_sampler "$number" tend_sampler "$join") || echo "sampler $number: not now" >&2
        fi
    done
}

run_states() {  # print one line for each host: active/exited 0, active/running 0, failed/failed 75, ...
    on_hosts all "systemctl show $UNIT --property=ActiveState,SubState,ExecMainStatus --value | paste -sd ' '"
}

verdict() {  # reduce run_states' lines, words in any order, to: running, over, preempted, gone, or failed CODE
    local line code worst=over
    while read -r line; do
        code=$(grep -oE '\b[0-9]+\b' <<<"$line" | head -n 1) || code=
        case $line in
            *running* | *activating*) [[ $worst != over ]] || worst=running ;;
            *dead*) [[ $worst == preempted ]] || worst=gone ;;  # the host has rebooted
            *" $PREEMPTED" | "$PREEMPTED "* | *" $PREEMPTED "*) worst=preempted ;;
            *) [[ $code == 0 || $worst == preempted ]] || worst="failed ${code:-?}" ;;
        esac
    done
    echo "$worst"
}

watch() {  # wait until the run has ended; print its outcome
    local outcome=running silent=0 now lines
    while [[ $outcome == running ]]; do
        samplers >&2
        sleep "${POLL_S:-30}"
        now=$(state)
        if [[ $now != ACTIVE && $now != UNKNOWN ]]; then
            outcome=preempted
        elif [[ $now == ACTIVE ]] && lines=$(run_states); then
            silent=0
            outcome=$(verdict <<<"$lines")
        elif ((++silent == 10)); then
            outcome=unreachable
        fi
    done
    echo "$outcome"
}

supervise() {
    (($#)) || fail "supervise needs a configuration: tpu.sh supervise CONFIG [section.key=value ...]"
    if [[ -n $dry_run ]]; then request; install; start "$@"; samplers; run_states; return; fi
    local failures=0 outcome
    while true; do
        case $(state) in
            ACTIVE) ;;
            NONE) request; wait_for_slice; install ;;
            SUSPENDED | SUSPENDING | FAILED)
                echo "$TPU_NAME was preempted: asking for another slice"
                delete_slice; request; wait_for_slice; install ;;
            *) wait_for_slice; install ;;
        esac
        start "$@"
        outcome=$(watch)
        case $outcome in
            over)
                echo "the run is done"
                [[ -z ${SAMPLERS-} ]] || { echo "the samplers' slices stay until tpu.sh delete"; each_sampler stop_unit; }
                return 0 ;;
            preempted) echo "preempted: the run resumes from its newest checkpoint" ;;
            *)
                failures=$((failures + 1))
                echo "the run: $outcome (failure $failures of ${MAX_FAILURES:-3}); see tpu.sh logs" >&2
                ((failures < ${MAX_FAILURES:-3})) || return 1 ;;
        esac
    done
}

delete_slice() { gc queued-resources delete "$TPU_NAME" --force --quiet; }
stop_unit() { on_hosts all "sudo systemctl kill --kill-whom=main --signal=SIGTERM $UNIT"; }

delete() {
    delete_slice
    each_sampler delete_slice
}

status() {
    state
    run_states
    each_sampler state
}

logs() {
    local follow="journalctl --unit $UNIT --output cat --lines 200 --follow"
    if [[ -n ${2-} ]]; then as_sampler "$2" on_hosts "${1:-0}" "$follow"; else on_hosts "${1:-0}" "$follow"; fi
}

stop() {
    stop_unit
    each_sampler stop_unit
}

: "${TPU_NAME:?set it to the name of the slice}" "${ZONE:?set it to its zone, such as us-east5-b}"
[[ ${SAMPLERS-} =~ ^[1-9]?[0-9]*$ ]] || fail "SAMPLERS=$SAMPLERS is no number"
case $command in
    start | supervise | samplers) [[ -z ${SAMPLERS-} ]] || needs_secret ;;
esac
case $command in
    create | install | delete | samplers | status | stop)
        (($# == 0)) || fail "$command takes no further arguments: $*"
        "$command" ;;
    start | supervise | logs) "$command" "$@" ;;
    *) fail "unknown command $command; tpu.sh --help lists them" ;;
esac
