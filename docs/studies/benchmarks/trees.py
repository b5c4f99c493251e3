"""Trees of arrays that are shaped like the gradients of models, or have many leaves."""

from __future__ import annotations

from typing import Final

from arraycomm.cli.bench.rows import Shapes


def _resnet50() -> Shapes:
    """Parameters of ResNet-50 (He, Zhang, Ren, Sun, 2016), in torchvision's order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(outputs, width, 1, 1), (outputs,), (outputs,)]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            inputs = outputs
    return (*shapes, (1000, 2048), (1000,))


def _gpt2() -> Shapes:
    """Parameters of the small GPT-2 (Radford and others, 2019): 12 blocks of width 768."""
    width = 768
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,)]
        shapes += [(width, width), (width,), (width,), (width,)]
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return (*shapes, (width,), (width,))


TREES: Final = {
    "ResNet-50": _resnet50(),
    "GPT-2": _gpt2(),
    "1,000 leaves": tuple((1000 + leaf,) for leaf in range(1000)),
}
