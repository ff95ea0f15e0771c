"""apex.parallel: LARC and batch norms in this process, the rest in two gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from apex.parallel import LARC, SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from torch import nn


@pytest.mark.parametrize("clip", [True, False])
def test_larc_scales_each_layers_rate(clip: bool) -> None:
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5) * 1e-3), nn.Parameter(torch.zeros(2))]
    wanted = [p.detach().double() for p in params]
    lr, decay, trust = 0.1, 0.3, 0.02
    optimizer = LARC(torch.optim.SGD(params, lr=lr, weight_decay=decay), trust, clip)
    for p in params:
        p.grad = torch.randn(p.shape) * 1e-2
    for i, p in enumerate(params):
        g = p.grad.double()
        if wanted[i].norm() > 0:
            local = trust * wanted[i].norm() / (g.norm() + decay * wanted[i].norm() + 1e-8)
            g = (g + decay * wanted[i]) * (min(local / lr, 1.0) if clip else local)
        wanted[i] = wanted[i] - lr * g
    optimizer.step()
    for p, w in zip(params, wanted, strict=True):
        torch.testing.assert_close(p.double(), w, rtol=1e-5, atol=1e-7)
    assert optimizer.param_groups[0]["weight_decay"] == decay
    optimizer.zero_grad()
    assert params[0].grad is None
    assert optimizer.state_dict() == optimizer.optim.state_dict()


def test_batch_norms_are_converted_with_the_tensors_they_have() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, 1e-3, 0.3), nn.Sequential(nn.BatchNorm2d(4)))
    model[1].running_mean.normal_()
    model.eval()
    x = torch.randn(3, 2, 5, 5)
    wanted, weight = model(x), model[1].weight
    converted = convert_syncbn_model(model)
    assert isinstance(converted[1], SyncBatchNorm)
    assert isinstance(converted[2][0], SyncBatchNorm)
    assert converted[1].weight is weight
    assert (converted[1].eps, converted[1].momentum, converted[1].training) == (1e-3, 0.3, False)
    torch.testing.assert_close(converted(x), wanted)


def test_batch_norm_with_channels_last_an_addition_and_a_relu() -> None:
    norm = SyncBatchNorm(4, channel_last=True, fuse_relu=True).eval()
    norm.running_mean.normal_()
    x, z = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4)
    wanted = torch.relu((x - norm.running_mean) / (1 + 1e-5) ** 0.5 + z)
    torch.testing.assert_close(norm(x, z), wanted)
    assert create_syncbn_process_group(0) is None


#: What each of two ranks runs; gradients are exact in binary, so that results can be compared for equality.
RANK = """
import torch, torch.distributed as dist
from torch import nn
from apex.optimizers import FusedSGD
from apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm, create_syncbn_process_group
from apex.parallel.distributed import flat_dist_call
dist.init_process_group("gloo")
rank = dist.get_rank()

def gradients(**options):
    torch.manual_seed(rank)  # weights differ until they are broadcast
    net = nn.Linear(3, 2)
    wrapped = DistributedDataParallel(net, **options)
    wrapped(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward()
    weights = [torch.empty_like(net.weight) for _ in range(2)]
    dist.all_gather(weights, net.weight.detach())
    assert torch.equal(*weights)
    before = net.weight.detach().clone()
    FusedSGD(wrapped.parameters(), 0.5).step()
    assert torch.equal(net.weight, before - 0.5 * net.weight.grad)
    return net.weight.grad

assert (gradients() == 2.0).all()
assert (gradients(delay_allreduce=True, message_size=1) == 2.0).all()
assert (gradients(gradient_average=False) == 4.0).all()
assert (gradients(gradient_predivide_factor=2.0) == 2.0).all()
assert (gradients(allreduce_always_fp32=True, gradient_average=False, gradient_predivide_factor=2.0) == 2.0).all()
try:
    gradients(shared_param=True)
except NotImplementedError as error:
    assert "DistributedDataParallel(shared_param=…)" in str(error)
else:
    raise AssertionError

torch.manual_seed(rank)
net = nn.Linear(3, 2)
reducer = Reducer(net)
net(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward()
reducer.reduce()
assert (net.weight.grad == 2.0).all() and (net.bias.grad == 1.0).all()
values = [torch.full((2,), float(rank)), torch.full((3,), 4.0 * rank, dtype=torch.float64)]
Reducer(values).reduce()
assert (values[0] == 0.5).all() and (values[1] == 2.0).all()
flat_dist_call(values, dist.broadcast, (1,))
flat_dist_call([values[0]], dist.all_reduce, (dist.ReduceOp.MAX,))
assert (values[0] == 0.25).all() and (values[1] == 2.0).all()

x, g = (torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
mine = slice(0, 2) if rank == 0 else slice(2, 5)
norm, exact = SyncBatchNorm(3, momentum=0.3), nn.BatchNorm1d(3, momentum=0.3).double()
with torch.no_grad():
    for module in (norm, exact):
        module.weight.copy_(torch.tensor([0.5, -2.0, 1.5]))
        module.bias.copy_(torch.tensor([1.0, 2.0, -1.0]))
own, whole = x[mine].clone().requires_grad_(), x.double().requires_grad_()
y, wanted = norm(own), exact(whole)
(y * g[mine]).sum().backward()
(wanted * g).sum().backward()
torch.testing.assert_close(y.double(), wanted[mine], rtol=1e-5, atol=1e-5)
torch.testing.assert_close(own.grad.double(), whole.grad[mine], rtol=1e-5, atol=1e-5)
torch.testing.assert_close(norm.running_mean.double(), exact.running_mean, rtol=1e-5, atol=1e-5)
torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-5, atol=1e-5)
dist.all_reduce(norm.weight.grad)
torch.testing.assert_close(norm.weight.grad.double(), exact.weight.grad, rtol=1e-5, atol=1e-5)
alone = SyncBatchNorm(3, process_group=create_syncbn_process_group(1))
torch.testing.assert_close(alone(own), nn.BatchNorm1d(3)(own), rtol=1e-5, atol=1e-5)

group = create_syncbn_process_group(1)
assert dist.get_process_group_ranks(group) == [rank]
try:
    create_syncbn_process_group(3)
except ValueError as error:
    assert "group_size is 3 and there are 2 ranks" in str(error)
else:
    raise AssertionError
dist.destroy_process_group()
print("rank", rank, "agrees")
"""


def test_workers_of_torchrun_inherit_the_shims_reduce_and_report(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    dropped = ("PYTHONPATH", "RANK", "FUSESTEP_RUN_FOLDER")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    answer = subprocess.run(
        [sys.executable, "-m", "fusestep.run", *torchrun],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("agrees") == 2
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("fusestep run: ")
    assert "apex.optimizers.FusedSGD by fusestep.optim.FusedSGD, " in last
    assert "apex.parallel.DistributedDataParallel by torch.nn.parallel.DistributedDataParallel" in last
