#!/bin/bash -l
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00

# Slurm starts the ranks: sbatch slurm.sh, for an MPI that was built with PMIx, such as Open MPI 5.
# For one that was built with PMI-2, as MPICH may be: sbatch --export=ALL,PLUGIN=pmi2 slurm.sh
module load openmpi # as your cluster calls it
set -eu
# shellcheck source=/dev/null
source env/bin/activate

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun does not take it from sbatch since Slurm 22.05
export ARRAYCOMM_TIMEOUT=600

ranks() {
    srun --mpi="${PLUGIN:-pmix}" --cpu-bind=cores --kill-on-bad-exit=1 "$@"
}

ranks python -m arraycomm doctor --frameworks numpy
ranks python train.py
