#!/bin/sh
# Start a program on the hosts that a file names, without a batch system:
#     sh hosts.sh hosts 16 train.py --epochs 10
# A line of the file is "node1:8" for MPICH, and "node1 slots=8" for Open MPI. Every host has the same
# environment in the same place, and lets ssh in without a password.
set -eu
hosts=$1 count=$2
shift 2

python=$(command -v python)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export ARRAYCOMM_TIMEOUT="${ARRAYCOMM_TIMEOUT:-600}"

ranks() {
    case $(mpiexec --version 2>&1) in
    *"Open MPI"*)
        mpiexec --hostfile "$hosts" -n "$count" --bind-to none \
            -x OMP_NUM_THREADS -x ARRAYCOMM_TIMEOUT "$@"
        ;;
    *) mpiexec -f "$hosts" -n "$count" "$@" ;;
    esac
}

ranks "$python" -m arraycomm doctor --frameworks numpy
ranks "$python" "$@"
