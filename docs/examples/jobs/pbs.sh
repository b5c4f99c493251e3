#!/bin/bash -l
#PBS -N train
#PBS -l select=2:ncpus=32:mpiprocs=8:ompthreads=4
#PBS -l place=scatter
#PBS -l walltime=01:00:00

# The mpiexec of MPICH and of Open MPI asks PBS for the nodes: qsub pbs.sh
module load mpich # or openmpi, as your cluster calls it
set -eu
cd "$PBS_O_WORKDIR"
# shellcheck source=/dev/null
source env/bin/activate

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" # what ompthreads says
export ARRAYCOMM_TIMEOUT=600
count=$(wc -l <"$PBS_NODEFILE")                # a line for each rank

ranks() {
    case $(mpiexec --version 2>&1) in
    *"Open MPI"*) mpiexec -n "$count" --bind-to none -x OMP_NUM_THREADS -x ARRAYCOMM_TIMEOUT "$@" ;;
    *) mpiexec -n "$count" "$@" ;;
    esac
}

ranks python -m arraycomm doctor --frameworks numpy
ranks python train.py
