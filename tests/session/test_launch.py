from arraycomm._launch import Launch, detect, torchrun_size


def test_each_launcher_is_known_by_its_variables() -> None:
    assert detect({"PMI_SIZE": "3", "PMI_RANK": "0"}) == Launch(3, "an mpiexec of the MPICH family")
    assert detect({"OMPI_COMM_WORLD_SIZE": "4"}) == Launch(4, "Open MPI's mpiexec")
    assert detect({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}) == Launch(2, "srun")


def test_nothing_else_is_taken_for_a_launcher() -> None:
    assert detect({}) is None
    assert detect({"SLURM_STEP_NUM_TASKS": "2"}) is None
    assert detect({"PMI_SIZE": "many"}) is None


def test_torchrun_is_known_by_its_run() -> None:
    assert torchrun_size({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8"}) == 8
    assert torchrun_size({"WORLD_SIZE": "8"}) == 0
