"""What README, the first page and the guides promise in words, beyond the code that they show: a test for each sentence.

`SHOWN` names, for each promise that other tests show, where.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from docs.studies import variables
from tests.support.launcher import needs_mpiexec, run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if not (ROOT / "arraycomm").is_dir():
    pytest.skip("there is no checkout here, only its tests", allow_module_level=True)
README = (ROOT / "README.md").read_text("utf-8")
INDEX = (DOCS / "index.md").read_text("utf-8")
SOURCES = [p for name in ("arraycomm", "adapters") for p in (ROOT / name).rglob("*.py")]
# What the pages say in words, and a test that shows it. Pages are read without line breaks and links.
SHOWN = {
    "with the same bits on every rank": "arraycomm/testing/conformance/_reductions.py every_rank_gets_the_same_bits",
    "needs neither root nor a compiler": "tests/test_packaging.py wheel_without_the_native_part_is_for_any_platform",
    "Every rank raises the same error, and none hangs": "tests/docs/test_links.py the_readme_shows_what_three_ranks_print",
    "If a rank raises, exits or is killed, the others hear of it": "tests/session/test_deaths.py ranks_over_mpi_see_that_others_have_died",
    "the others [give up after a timeout] and name it": "tests/protocol/test_missing_ranks.py rank_that_never_comes_is_named",
    "thinc, or an optimizer of your own": "tests/docs/test_trainings.py two_ranks_learn_as_one",
    "the others give up after a timeout and name it": "tests/protocol/test_missing_ranks.py rank_that_never_comes_is_named",
    "The ranks may use different frameworks": "arraycomm/testing/conformance/_reductions.py layout_and_framework_do_not_matter",
    "added in the order of the ranks": "arraycomm/testing/conformance/_reductions.py allreduce_is_the_fold_in_rank_order",
    "added in float32 and rounded once": "arraycomm/testing/conformance/_reductions.py every_dtype_has_its_ops",
    "on any number of ranks": "properties/test_data_laws.py epoch_resumed_anywhere_by_any_number_of_ranks",
    "Collectives inside `jit`, with `grad`, `vmap` and `scan`": "tests/adapters/test_jax_collectives.py compiled_programs",
    "shrinks to a small example": "tests/testing/test_given.py failure_shrinks_to_the_smallest_example",
    "`doctor` says what is wrong": "tests/cli/test_doctor.py what_is_wrong_gets_one_advice",
    "`trace` shows who waited for whom": "tests/cli/test_trace.py command_prints_lines_and_who_waited",
    "Both libraries work in one program": "tests/docs/test_claims.py mpi_io_and_a_window_go_with_it_in_one_program",
    "Three lines make this loop in PyTorch data-parallel": "tests/docs/test_trainings.py two_ranks_learn_as_one",
    "[the same bits on any number of ranks]": "properties/test_virtual_laws.py programs_give_the_same_on_every_number_of_ranks",
    "`make demo` shows it": "tests/docs/test_demo.py two_ranks_learn_what_one_process_learns",
    "ends all of them once one fails": "tests/cli/test_run.py all_end_once_one_has_failed",
    "start processes that [share memory]": "tests/cli/test_run.py without_an_mpi_ranks_are_processes_of_this_node",
    "starts [ranks of its own]": "tests/session/test_launch_function.py results_come_in_rank_order_and_prints_in_lines",
    "all are below 1": "tests/docs/test_claims.py the_picture_of_the_readme_shows_what_its_words_say",
    "take longer than mpi4py's": "tests/docs/test_claims.py what_is_slower_in_the_table_is_said_in_the_readme",
    "`MismatchError` on every rank": "tests/protocol/test_errors.py ranks_that_differ_raise_mismatch_everywhere",
    "`PeerError` with its traceback on the others": "tests/session/test_failing.py rank_that_raises_is_told_to_all",
    "Programs for `torch.distributed` also run over arraycomm": "tests/adapters/test_torch_distributed.py over_mpi",
    "on one process or on many": "tests/docs/test_library_tests.py a_program_of_the_first_hour_ends_well",
    "You mix frameworks": "properties/test_check_laws.py exchanged_arrays_have_the_same_elements",
    "[without a launcher]": "tests/testing/test_run.py results_come_by_rank",
    "sliced, transposed, 0-d, empty, with negative strides": "arraycomm/testing/conformance/_reductions.py layout_and_framework_do_not_matter",
    "The result is an array of the same framework, dtype and device": "arraycomm/testing/conformance/_reductions.py allreduce_is_the_fold_in_rank_order",
    "runs functions and Hypothesis tests on ranks that are threads": "tests/testing/test_run.py results_come_by_rank",
    "It shares memory if that is safe": "tests/arrays/test_exchange.py aligned_memory_is_shared",
    "it raises a `BufferError` that gives the reason": "tests/arrays/test_exchange.py copy_false_says_why_not",
    "it does not cut them to 32 bits": "tests/arrays/test_exchange.py jax_never_cuts_64_bits",
    "This table is for a fresh, writable": "tests/arrays/test_exchange.py the_page_of_pairs_is_current",
    "A rank that passes nothing to `bcast` gets an array of the root's framework": "tests/arrays/test_namespaces.py dtypes_of_the_root_that_a_namespace_lacks_raise_on_all_ranks",
    "aligned to 64 bytes, and hands that memory": "tests/arrays/test_results.py result_is_handed_over_without_a_copy",
    "A NumPy array over a JAX array": "tests/arrays/test_exchange.py immutable_arrays_are_read_only_in_numpy",
    "lazy conjugates and negatives of PyTorch": "tests/arrays/test_exchange.py lazy_conjugation_is_resolved",
    "MLX copies what it is given": "tests/arrays/test_results.py mlx_copies",
    "whichever works first": "tests/arrays/test_dlpack.py refusal_falls_through_to_the_next_protocol",
    "raises a `TypeError` before data moves, and `PeerError` on the other ranks": "tests/arrays/test_namespaces.py namespaces_that_cannot_make_the_result_raise_on_all_ranks",
    "comes back as a NumPy array": "tests/docs/test_claims.py an_object_without_a_namespace_comes_back_as_numpy",
    "refuse such classes with a `TypeError` that names the class": "tests/arrays/test_own_arithmetic.py arithmetic_of_ones_own_is_refused_by_name",
    "come back as the plain array or number": "tests/arrays/test_own_arithmetic.py subclasses_without_arithmetic_come_back_plain",
    "is refused with a `TypeError`, as a torch tensor": "tests/arrays/test_autodiff.py wanted_gradients_are_not_lost",
    "`copy=True` always copies": "properties/test_check_laws.py exchanged_arrays_have_the_same_elements",
    "The scatters and `recv` give NumPy arrays": "arraycomm/testing/conformance/_movements.py scatter_hands_out_rows",
    "They move between NumPy, PyTorch and JAX without a copy": "tests/arrays/test_exchange.py aligned_memory_is_shared",
    "cannot say whether its memory may be written to, and counts as read-only": "tests/cuda/test_arrays.py dlpack_without_a_version_is_read_only",
    "Python numbers have no memory to share": "tests/arrays/test_exchange.py numbers_buffers_and_what_shows_memory_become_arrays",
    "Other byte orders": "arraycomm/testing/conformance/_reductions.py byte_order_does_not_matter",
    "the result is what the `from_dlpack` of that namespace returns": "tests/arrays/test_namespaces.py results_are_what_the_namespace_makes",
    "None as `__array_ufunc__` is no arithmetic": "tests/arrays/test_own_arithmetic.py subclasses_without_arithmetic_come_back_plain",
    "a copy to the host goes through pinned memory": "tests/cuda/on_device/test_door.py chunks_go_through_pinned_memory_and_back",
    "Record arrays stay record arrays": "tests/collectives/test_structures.py record_arrays_come_back_as_such",
    "functions of the notebook need `pip install cloudpickle`": "tests/session/test_launch_function.py what_cannot_be_launched_is_refused",
    "`mpiexec -n 3 python program.py` works as well": "tests/session/test_failing.py rank_that_raises_is_told_to_all",
}


def test_every_promise_in_words_has_its_test() -> None:
    pages = README + INDEX + (DOCS / "interop.md").read_text("utf-8")
    said = " ".join(re.sub(r"\]\(\S+\)", "]", pages).split())
    assert [words for words in SHOWN if words not in said] == []
    for file, test in (shown.split() for shown in SHOWN.values()):
        assert f"def test_{test}(" in (ROOT / file).read_text("utf-8"), (file, test)


def test_what_is_slower_in_the_table_is_said_in_the_readme() -> None:
    """What takes a third longer than mpi4py's, as of 8 bytes under MPICH, is named there."""
    named = {
        "messages": ("sendrecv", "isend and irecv", "send, and recv back"),
        "requests": ("iallreduce and wait",),
        "objects": ("bcast_object",),
        "broadcasts, gathers and scatters": ("bcast", "gather", "scatter"),
        "trees of a few numbers": ("allreduce_tree, two leaves",),
    }
    table = (DOCS / "benchmarks.md").read_text("utf-8").partition("## Each call")[2]
    table = table.partition("\n## ")[0]
    rows = re.findall(r"^\| (\w[^|]*) \| \**([\d.]+)", table, re.MULTILINE)
    slower = {name for name, ratio in rows if float(ratio) > 4 / 3}
    assert slower <= {name for names in named.values() for name in names}
    said = README.partition("## Speed")[2].partition("\n## ")[0].lower()
    assert [
        words for words, names in named.items() if slower & {*names} and words not in said
    ] == []


def test_each_promise_in_bold_says_something_that_is_shown() -> None:
    """A new one needs words of `SHOWN`."""
    text = re.sub(r"\]\(\S+\)", "]", README + INDEX)
    said = re.findall(r"^(?:\||-) ?(\*\*.+?(?=\n(?:\||-|\n)))", text, re.MULTILINE | re.DOTALL)
    promises = [" ".join(each.split()) for each in said if "](" not in each[:40]]
    lead_on = ("Start", "Guides", "Help", "Reference", "Internals")
    for promise in promises:
        leads_on = promise.startswith(tuple(f"**{name}**" for name in lead_on))
        assert leads_on or any(words in promise for words in SHOWN), promise


def test_the_picture_of_the_readme_shows_what_its_words_say() -> None:
    """All bars, of two ranks under MPICH, are below 1."""
    table = (DOCS / "benchmarks.md").read_text("utf-8").partition("## On your machine")[0]
    bars = [
        float(row.split("|")[3].strip(" *"))
        for row in re.findall(r"^\| .*at.*\|$|^\| .*a tree.*\|$", table, re.MULTILINE)
    ]
    assert len(bars) >= 10
    assert max(bars) < 1
    assert "all are below 1" in README


def test_layouts_may_differ_between_ranks() -> None:
    def total(comm: ac.Communicator) -> object:
        x = np.arange(6.0).reshape(2, 3)
        return comm.allreduce([x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2]][comm.rank])

    assert all((np.asarray(got) == 3 * np.arange(6.0).reshape(2, 3)).all() for got in run(3, total))


def test_an_object_without_a_namespace_comes_back_as_numpy() -> None:
    class Owned:
        def __init__(self) -> None:
            self.__array_interface__ = np.ones(2).__array_interface__

    assert "NumPy's for an object" in INDEX
    assert type(run(1, lambda comm: comm.allreduce(Owned()))[0]) is np.ndarray


@needs_mpiexec
@pytest.mark.each_mpi
def test_mpi_io_and_a_window_go_with_it_in_one_program(tmp_path: Path) -> None:
    page = (DOCS / "from-mpi4py.md").read_text("utf-8")
    (tmp_path / "program.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    job = run_python("-m", "arraycomm", "run", "-n", "3", "program.py", cwd=tmp_path)
    assert (job.returncode, job.stdout.count("rows and counter are right")) == (0, 3), job.stderr


def test_println_on_one_rank_is_told_how_to_print_on_one() -> None:
    def prints(comm: ac.Communicator) -> None:
        ac.println("here", comm=comm) if comm.rank == 0 else comm.barrier()

    with pytest.raises(ac.MismatchError, match=r"Every rank has to call println; ranks=0 lets"):
        run(2, prints)


# Environment variables


def test_the_table_of_variables_is_what_the_code_reads() -> None:
    texts = [source.read_text("utf-8") for source in (*SOURCES, ROOT / "setup.py")]
    read = {name for text in texts for name in re.findall(r'"(ARRAYCOMM_[A-Z_]+)"', text)}
    assert read == set(variables.VARIABLES)


def test_the_page_of_variables_has_the_table() -> None:
    page = variables.PAGE.read_text("utf-8")
    assert page == variables.written(page), "run: python -m docs.studies.variables"
    others = re.findall(r"`([A-Z][A-Z0-9_]{3,})`", page.partition("## Of others")[2])
    code = "".join(source.read_text("utf-8") for source in SOURCES)
    assert [name for name in others if name not in code and name not in ("WARN", "NAME")] == []


@pytest.mark.parametrize("name", ["ARRAYCOMM_TIMEOUT", "ARRAYCOMM_REPORT_AFTER"])
def test_the_defaults_of_the_table_are_those_of_init(name: str) -> None:
    program = "import inspect, arraycomm as ac; print(inspect.signature(ac.init))"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    argument = name.removeprefix("ARRAYCOMM_").lower()
    found = re.search(rf"{argument}: [^=]+= ([\d.]+)", said.stdout)
    assert found is not None
    assert float(found[1]) == float(variables.VARIABLES[name].default)


def test_the_optional_dependency_of_the_page_is_the_file_that_type_checkers_read() -> None:
    page = (DOCS / "embedding.md").read_text("utf-8")
    program = (DOCS / "examples" / "optional_dependency.py").read_text("utf-8")
    body = program.split('"""\n', 1)[1].partition("\n\nif __name__")[0].strip()
    assert body in page
    assert "optional_dependency.py" in (ROOT / "Makefile").read_text("utf-8")


@pytest.mark.parametrize("missing", [False, True])
def test_the_optional_dependency_may_be_missing(missing: bool, tmp_path: Path) -> None:
    program = DOCS / "examples" / "optional_dependency.py"
    isolated = ["-I", "-S"] if missing else []
    job = subprocess.run([sys.executable, *isolated, str(program)], cwd=tmp_path, check=False)
    assert job.returncode == 0
