#!/bin/bash -l
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00

# Each rank is a process in a container: sbatch container.sh. The image has Python, arraycomm, and an MPI
# that understands the process management interface of this Slurm.
module load apptainer # if your cluster has it as a module
set -eu
image=train.sif

export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun does not take it from sbatch since Slurm 22.05
export ARRAYCOMM_TIMEOUT=600

ranks() {
    srun --mpi="${PLUGIN:-pmix}" --cpu-bind=cores --kill-on-bad-exit=1 \
        apptainer exec --bind "$PWD" "$image" "$@"
}

ranks python -m arraycomm doctor --frameworks numpy
ranks python "$PWD/train.py"
