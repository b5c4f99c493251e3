"""Run training programs on several ranks and in one process, and compare the numbers that they print.

    python demo.py --frameworks numpy,torch --ranks 3

A program for each framework trains a network to read handwritten digits. One more fits a line, with another framework on
each rank. The last one trains with virtual ranks, of which a table shows that the number of ranks changes no bit. `make demo` installs what they need first, and needs no GPU.
"""

import argparse
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
PRECISIONS = {"numpy": "float64", "torch": "float32", "jax": "float32"}
ANY_FRAMEWORK = "train_any_framework.py"
SAME_BITS, COUNTS = "same_bits.py", (1, 2, 3, 4)
# Ranks add up a batch in another order than one process does, so float32 differs by some roundings of 6e-8 in each step.
TOLERANCE = 1e-4
LEAST_ACCURACY = 0.8


def lines(program: str, arguments: list[str], ranks: int) -> list[str]:
    """Run a program, and return the lines that it prints; 1 rank is one process, without MPI."""
    launcher = ["-m", "arraycomm", "run", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(HERE / program), *arguments]
    # Kernels that take several threads add up in another order with another number of them.
    on_the_host = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # The programs begin with a checkpoint if there is one.
    with TemporaryDirectory() as empty:
        done = subprocess.run(
            command, cwd=empty, env=os.environ | on_the_host, stdout=subprocess.PIPE, check=True
        )
    # Without the time, the rank and the number of ranks.
    return [line.partition("] ")[2] for line in done.stdout.decode().splitlines()]


def numbers(program: str, arguments: list[str], ranks: int) -> list[list[float]]:
    """Run a program, and return the numbers in each line that it prints."""
    found = lines(program, arguments, ranks)
    return [[float(text) for text in re.findall(r"-?\d+\.\d+|nan|inf", line)] for line in found]


def same_bits(frameworks: list[str]) -> bool:
    """Print what a training with virtual ranks ends with on 1 to 4 ranks; return whether that is one result."""
    print(f"{SAME_BITS}: as 12 ranks would train\n\n| framework | ranks | result |\n|---|---:|---|")
    results = []
    for name in frameworks:
        for ranks in COUNTS:
            [line] = lines(SAME_BITS, ["--framework", name], ranks)
            print(f"| {name} | {ranks} | {line} |", flush=True)
            results.append((name, line))
    return len(set(results)) == len(frameworks)


def verdict(program: str, several: list[list[float]], one: list[list[float]]) -> str:
    """Return what is wrong with the numbers that ranks printed, beside those of one process; else nothing."""
    if not several or not one:
        return "nothing was printed"
    if program == ANY_FRAMEWORK:
        if several != several[:1] * len(several):
            return f"ranks ended with different parameters: {several}"
        one = one * len(several)
    elif not several[-1][-1] >= LEAST_ACCURACY:
        return f"the accuracy is under {LEAST_ACCURACY}: {several[-1:]}"
    if list(map(len, several)) != list(map(len, one)):
        return f"the ranks printed {several}, and one process {one}"
    pairs = zip(chain(*several), chain(*one), strict=True)
    far = [f"{a} and {b}" for a, b in pairs if not abs(a - b) <= TOLERANCE]
    return f"further apart than {TOLERANCE:.0e}: {', '.join(far)}" if far else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frameworks", default=",".join(PRECISIONS), metavar="NAME,…")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    frameworks = options.frameworks.split(",")
    if not set(frameworks) <= PRECISIONS.keys():
        parser.error(f"--frameworks are of {', '.join(PRECISIONS)}; got {options.frameworks}")
    epochs = ["--epochs", str(options.epochs), "--precision"]
    runs = {f"train_{name}.py": [*epochs, PRECISIONS[name]] for name in frameworks}
    failed = 0
    for program, arguments in {**runs, ANY_FRAMEWORK: frameworks}.items():
        print(f"{program} {' '.join(arguments)}", flush=True)
        try:
            several, one = (numbers(program, arguments, ranks) for ranks in (options.ranks, 1))
            wrong = verdict(program, several, one)
            print(f"  {options.ranks} ranks:", *several[-1:])
            print("  one process:", *one[-1:])
        except subprocess.CalledProcessError as error:
            wrong = f"a program ended with status {error.returncode}"
        print(f"  FAILED: {wrong}" if wrong else "  the same", flush=True)
        failed += bool(wrong)
    if not failed:
        same = same_bits(frameworks)
        print("\nThe same bits." if same else "\nFAILED: the number of ranks has changed a result.")
        failed += not same
    if not failed:
        print(f"Passed: {options.ranks} ranks learn what one process learns.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
