#!/bin/bash
# What becomes of a program under a real Slurm: each kind of --mpi, one and two tasks, each Python that is named.
#     sudo bash docs/studies/slurm.sh .venv/bin/python .venv-openmpi/bin/python
# On a machine of one's own, as root: it configures a Slurm of one node (Debian: slurmctld, slurmd, slurm-client and
# munge), unless one answers already, and leaves it running.
set -euo pipefail
program='import arraycomm as ac; c = ac.init(timeout=20); print(f"{c.size} {c.backend}: {c.allreduce(1)}")'

if ! timeout 5 sinfo > /dev/null 2>&1; then
    mkdir -p /etc/slurm /var/spool/slurmd /var/spool/slurmctld /run/munge
    chown munge: /run/munge
    cat > /etc/slurm/slurm.conf <<END
ClusterName=one
SlurmctldHost=$(hostname -s)
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=$(hostname -s) CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
END
    pgrep -x munged > /dev/null || runuser -u munge -- munged --force
    slurmctld && slurmd && sleep 4
fi

say() { # what was tried, and what it printed last of what matters
    local status=0 said
    said=$(timeout 60 "${@:2}" 2>&1) || status=$?
    said=$(grep -aE '^[0-9]+ [a-z]+: |Unavailable' <<< "$said" | sort -u | tail -1 | sed 's/^arraycomm\.//')
    printf '| %s | %s | %s |\n' "$1" "$status" "${said:-nothing}"
}
echo '| | status | says |'
echo '|---|---|---|'
for python in "$@"; do
    for kind in none pmi2 pmix; do
        for tasks in 1 2; do
            for address in '' 127.0.0.1:4399; do
                say "$python, --mpi=$kind, $tasks${address:+, coordinator address}" \
                    env ${address:+ARRAYCOMM_COORDINATOR_ADDRESS=$address} \
                    srun --mpi="$kind" -n "$tasks" --overcommit "$python" -c "$program"
            done
        done
        say "$python, arraycomm run -n 2 in a shell of srun --mpi=$kind" \
            srun --mpi="$kind" -n 1 "${python%/*}/arraycomm" run -n 2 -c "$program"
    done
done
