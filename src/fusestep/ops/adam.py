"""One step of Adam or AdamW for many parameters in one launch.

    g ← g / divisor                                         (a loss scale, clipping, or both; 1 without them)
    g ← g + weight_decay · w                                 (Adam: L2)
    m ← m + (1 − β₁)(g − m)         v ← β₂ v + (1 − β₂) g²
    w ← w · (1 − lr · weight_decay)                         (AdamW: decoupled)
    w ← w − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)

w is the fp32 master where there is one, else the parameter itself; t counts the steps of each parameter. All arithmetic
is fp32, whatever the dtypes in memory. Where `skip` is not 0 nothing changes, the step count included.
Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101; eps as in torch.optim.AdamW.

The reference stands in adam_reference.py, the kernel and its launch in adam_kernel.py. FusedAdam uses those directly,
with a table of addresses that it keeps between steps; the op here builds one for each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusestep.dispatch import one_device, uses_triton
from fusestep.errors import UserError
from fusestep.ops import adam_copies
from fusestep.ops.adam_kernel import MASTER_WORDS, AdamSignature, Master, adam_rows, compilations, launch_adam
from fusestep.ops.adam_reference import Hyperparameters, adam_reference
from fusestep.ops.adam_remainders import parted, whole
from fusestep.ops.dtypes import KERNEL_DTYPES, dtype_name
from fusestep.ops.gradient_norm import to_device
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define, relative_error
from fusestep.ops.tensor_table import build_table, entry, upload


def _adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adam_w_mode: bool,
    bias_correction: bool,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    lists = {"parameter": parameters, "gradient": gradients, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    lists["master"] = masters
    device = one_device("adam_", **{f"{name} {i}": t for name, one in lists.items() for i, t in enumerate(one)})
    by_signature: dict[AdamSignature, list[int]] = {}
    for i, parameter in enumerate(parameters):
        master = Master.of(masters[i] if masters else None)
        if master == Master.REMAINDER and parameter.dtype != torch.bfloat16:
            raise UserError(
                f"adam_: master {i} is int16, which is what rounding to bf16 leaves, and its parameter is "
                f"{parameter.dtype}; pass the fp32 master."
            )
        signature = AdamSignature(device, parameter.dtype, gradients[i].dtype, exp_avgs[i].dtype, master)
        by_signature.setdefault(signature, []).append(i)
    for signature, members in by_signature.items():
        own_parameters, own_gradients, own_exp_avgs, own_exp_avg_sqs, own_steps = (
            [one[i] for i in members] for one in (parameters, gradients, exp_avgs, exp_avg_sqs, steps)
        )
        own_masters = [masters[i] for i in members] if masters else []
        tensors = (own_parameters, own_gradients, own_exp_avgs, own_exp_avg_sqs, own_masters)
        reason = signature.unsupported()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            reason = reason or "a table of addresses cannot be built while a CUDA graph is captured"
        if uses_triton("adam", device, reason):
            hyper = Hyperparameters(0.0, beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction)
            _adam_once(signature, *tensors, own_steps, lr, hyper, divisor, skip)
        elif skip is None or not skip.item():
            torch._foreach_add_(own_steps, 1.0)
            hyper = Hyperparameters(float(lr), beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction)
            counts = [float(step) for step in own_steps]
            adam_reference(*tensors, counts, hyper, 1.0 if divisor is None else float(divisor))


def _adam_once(
    signature: AdamSignature,
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    hyper: Hyperparameters,
    divisor: Tensor | None,
    skip: Tensor | None,
) -> None:
    """The kernel over a table for this call alone; an optimizer keeps its table instead."""
    device = signature.device
    learning_rate = lr.to(device, torch.float32, non_blocking=True)
    entries = []
    for i, (parameter, gradient, exp_avg, exp_avg_sq) in enumerate(
        zip(parameters, gradients, exp_avgs, exp_avg_sqs, strict=True)
    ):
        tensors, rows = adam_rows(
            parameter, exp_avg, exp_avg_sq, masters[i] if masters else None, learning_rate.data_ptr(), 0, i
        )
        entries.append(entry(exp_avg, gradient, tensors, rows))
    before = torch.stack([step.to(device, torch.float32).reshape(()) for step in steps])
    after = before.clone()
    if divisor is not None or skip is not None:
        divisor = torch.ones((), device=device) if divisor is None else to_device(divisor, device)
        skip = torch.zeros((), device=device) if skip is None else to_device(skip, device)
    launch_adam(
        signature,
        build_table(device, entries),
        upload([hyper.row()], torch.float32, device),
        before,
        after,
        torch.zeros(2, dtype=torch.int64, device=device),
        divisor=divisor,
        skip=skip,
    )
    torch._foreach_copy_(steps, list(after.unbind()))


def _adam_fake(*_args: object) -> None:
    return None


_adam_op = define(
    "adam_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor lr, float beta1, float beta2, float eps, float weight_decay,"
    " bool adam_w_mode, bool bias_correction, Tensor? divisor, Tensor? skip) -> ()",
    _adam,
    _adam_fake,
)


def adam_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor | float,
    masters: Sequence[Tensor] = (),
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """One step in place for tensors of one device: one launch for each combination of dtypes.

    Args:
        parameters, gradients: n tensors each, of equal shapes; any strides and real dtypes. No two parameters, and no
            two elements of one, may share memory.
        exp_avgs, exp_avg_sqs: n dense tensors each, of the parameters' shapes and all in one order of memory.
        steps: n tensors of one fp32 element, the steps taken so far; counted up.
        lr: 0-d, or a number.
        masters: n fp32 tensors like exp_avgs, updated in the parameters' stead; or int16 ones, what bf16 parameters
            leave of these (adam_remainders.py); or none.
        divisor: 0-d, of the gradients.
        skip: 0-d; where it is not 0, nothing changes.

    Raises: UserError for a tensor on another device and for remainders of other parameters, before anything is changed.

    No wait for the device, except in the reference on a GPU. FusedAdam keeps its table of addresses between steps and
    costs the host less.
    Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    lr = lr if isinstance(lr, Tensor) else torch.tensor(lr)
    _adam_op(
        list(parameters), list(gradients), list(exp_avgs), list(exp_avg_sqs), list(masters), list(steps), lr,
        beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction, divisor, skip,
    )  # fmt: skip


def _kept(weights: list[Tensor], dtype: torch.dtype, master: Master) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters, masters) of these fp32 weights, in memory of their own."""
    if master == Master.REMAINDER:
        parts = [parted(w) for w in weights]
        return [parameter for parameter, _ in parts], [remainder for _, remainder in parts]
    masters = [w.clone() for w in weights] if master == Master.WHOLE else []
    return [w.to(dtype, copy=True) for w in weights], masters


def _prove(device: torch.device) -> list[Proof]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    proofs = []
    cases = [(dtype, Master.NONE if dtype == torch.float32 else Master.WHOLE) for dtype in KERNEL_DTYPES]
    for dtype, kind in (*cases, (torch.bfloat16, Master.REMAINDER)):
        weights = [random(33, 65), random(1024), random(7, 9).t(), random(2049)[1:]]
        gradients = [torch.randn(w.shape, generator=generator).to(device, dtype) for w in weights]
        moments = [(torch.empty_like(w).copy_(w / 9), torch.empty_like(w).copy_(w * w)) for w in weights]
        ours, theirs = (
            [*_kept(weights, dtype, kind), *([m.clone() for m in one] for one in zip(*moments, strict=True))]
            for _ in range(2)
        )
        steps = [torch.full((), 3.0, device=device) for _ in weights]
        parameters, masters, first, second = ours
        adam_(parameters, gradients, first, second, steps, lr=0.01, masters=masters, weight_decay=0.1)
        parameters, masters, first, second = theirs
        hyper = Hyperparameters(0.01, 0.9, 0.999, 1e-8, 0.1)
        adam_reference(parameters, gradients, first, second, masters, [4.0] * len(weights), hyper)
        got, wanted = (
            {
                "weights": list(map(whole, p, kept)) if kind == Master.REMAINDER else kept or p,
                "moments": first + second,
            }
            for p, kept, first, second in (ours, theirs)
        )
        what = f"adam of {dtype_name(dtype)}{MASTER_WORDS[kind].replace(',', ' with')}"
        for name in got:
            flat = [torch.cat([t.reshape(-1) for t in one[name]]) for one in (got, wanted)]
            proofs.append(Proof(f"{what}: {name}", relative_error(*flat), 1e-6))
    return proofs


def _compilations() -> Iterator[Compilation]:
    yield from compilations()
    yield from adam_copies.compilations()


catalogue(Op("adam", "Adam and AdamW, all parameters in one launch", _prove, _compilations))
