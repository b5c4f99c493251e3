"""Trees of arrays that are shaped like the gradients of models, or have many leaves."""

from __future__ import annotations

from typing import Final

from arraycomm.cli.bench import rows


def _resnet50() -> rows.Shapes:
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


TREES: Final = {"ResNet-50": _resnet50(), **rows.TREES}
