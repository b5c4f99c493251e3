"""Programs of Lightning, its Fabric, Accelerate and ignite, over arraycomm: each gives the parameters of a plain loop over gloo."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import arraycomm.adapters.torch_distributed  # noqa: F401
from tests.support.launched import perform

RANKS: Final = 2
_BY_TORCHRUN: Final = "TORCHELASTIC_RUN_ID" in os.environ


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _data() -> TensorDataset:
    torch.manual_seed(4)
    return TensorDataset(torch.randn(24, 6), torch.randn(24, 1))


def _train(
    model: torch.nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> list[torch.Tensor]:
    for x, y in batches:
        optimizer.zero_grad()
        backward((model(x) - y).square().mean())
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _over_gloo(batches: Iterable[Any]) -> list[torch.Tensor]:
    model = DistributedDataParallel(_model(), process_group=dist.new_group(backend="gloo"))
    return _train(model, torch.optim.SGD(model.parameters(), 0.1), batches)


def accelerate() -> None:
    """On the CPU, Accelerate takes the group that is there; else it makes one of gloo."""
    from accelerate import Accelerator

    if not _BY_TORCHRUN:
        # It starts gloo, and sets a part of what torch meets by: no address.
        assert Accelerator(cpu=True).num_processes == RANKS
        dist.destroy_process_group()
    dist.init_process_group("arraycomm")
    accelerator = Accelerator(cpu=True)
    model = _model()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(_data(), 4)
    )
    assert dist.get_backend(model.process_group) == "arraycomm"
    found = _train(model, optimizer, batches, accelerator.backward)
    # It deals out whole batches.
    own = [batch for k, batch in enumerate(DataLoader(_data(), 4)) if k % RANKS == dist.get_rank()]
    torch.testing.assert_close(found, _over_gloo(own))
    assert accelerator.gather(torch.tensor([dist.get_rank()])).tolist() == [0, 1]


def fabric() -> None:
    """Fabric starts the backend by its name, with the ranks of mpi4py or of torchrun."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="arraycomm")
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=RANKS)
    fabric.launch()
    assert dist.get_backend() == "arraycomm"
    model = _model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    batches = fabric.setup_dataloaders(DataLoader(_data(), 4))
    found = _train(model, optimizer, batches, fabric.backward)
    sampler = DistributedSampler(_data(), RANKS, dist.get_rank(), shuffle=False)
    torch.testing.assert_close(found, _over_gloo(DataLoader(_data(), 4, sampler=sampler)))
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).flatten().tolist() == [0, 1]
    fabric.barrier()


def lightning() -> None:
    """What it logs from all ranks is averaged by a count of samples, an integer."""
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = (self.model(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            self.log("rank", dist.get_rank(), sync_dist=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("rows", torch.tensor(len(batch[0])), sync_dist=True, reduce_fx="sum")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=DDPStrategy(process_group_backend="arraycomm"),
        devices=RANKS,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Module()
    batches = DataLoader(
        _data(), 4, sampler=DistributedSampler(_data(), RANKS, trainer.global_rank, shuffle=False)
    )
    trainer.fit(module, batches, batches)
    assert dist.get_backend() == "arraycomm"
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (logged["rank"], logged["rows"]) == (0.5, 24)
    torch.testing.assert_close([p.detach() for p in module.parameters()], _over_gloo(batches))


def ignite() -> None:
    """It wraps the model, under each name that torch takes for the backend."""
    dist.init_process_group("arraycomm" if _BY_TORCHRUN else "cpu:arraycomm")
    # Afterwards, as a program does that imports it where it needs it.
    import ignite.distributed as idist

    model = idist.auto_model(_model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.1))
    batches = idist.auto_dataloader(_data(), batch_size=4 * RANKS, shuffle=False)
    torch.testing.assert_close(_train(model, optimizer, batches), _over_gloo(batches))
    assert idist.all_gather(idist.get_rank()) == [0, 1]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    perform([globals()[sys.argv[1]]])
    dist.destroy_process_group()
