"""One step of Adam or AdamW for many parameters in one launch.

    g ← g / divisor                                         (a loss scale, clipping, or both; 1 without them)
    g ← g + weight_decay · w                                 (Adam: L2)
    m ← m + (1 − β₁)(g − m)         v ← β₂ v + (1 − β₂) g²
    w ← w · (1 − lr · weight_decay)                         (AdamW: decoupled)
    w ← w − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)

w is the fp32 master where there is one, else the parameter itself; t counts the steps of each parameter. All arithmetic
is fp32, whatever the dtypes in memory. Where `skip` is not 0 nothing changes, the step count included.
Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101; eps as in torch.optim.AdamW.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fusestep.dispatch import uses_triton
from fusestep.language import tl, triton
from fusestep.ops.gradient_norm import KERNEL_DTYPES, to_device
from fusestep.ops.launch import launch
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define, relative_error
from fusestep.ops.tensor_table import (
    BLOCK,
    COMMON_ROWS,
    DIM_COUNT,
    FIRST_CHUNK,
    FIRST_DIM,
    GRADIENT,
    NUMEL,
    TensorTable,
    build_table,
    entry,
    flat,
    is_dense,
    strided_offsets,
    upload,
)

#: This op's rows of the table, after the common ones.
PARAMETER: tl.constexpr = tl.constexpr(COMMON_ROWS)
EXP_AVG: tl.constexpr = tl.constexpr(COMMON_ROWS + 1)
EXP_AVG_SQ: tl.constexpr = tl.constexpr(COMMON_ROWS + 2)
MASTER: tl.constexpr = tl.constexpr(COMMON_ROWS + 3)
LEARNING_RATE: tl.constexpr = tl.constexpr(COMMON_ROWS + 4)  # address of an fp32
GROUP: tl.constexpr = tl.constexpr(COMMON_ROWS + 5)  # row of `hyper`
STEP: tl.constexpr = tl.constexpr(COMMON_ROWS + 6)  # place in `steps`

#: Elements that the reference takes through all of its passes at once.
BATCH = 1 << 17

#: Floats a group in `hyper`; the order is that of `Hyperparameters.row`.
HYPER_ROW: tl.constexpr = tl.constexpr(16)

#: (parameter, gradient): a gradient has its parameter's dtype, or fp32 (accumulated), or is narrower than fp32 weights.
DTYPE_PAIRS = [(p, g) for p, g in product(KERNEL_DTYPES, KERNEL_DTYPES) if p == g or torch.float32 in (p, g)]
MOMENT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Hyperparameters:
    """What one parameter group asks of Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool = True
    bias_correction: bool = True

    def row(self) -> list[float]:
        """The numbers as the kernel reads them; differences and logarithms are formed here, in double precision."""

        def log_beta(beta: float) -> float:
            # 1 − β^t is −expm1(t · log β); −∞ makes it 1.
            return math.log(beta) if self.bias_correction and beta > 0 else -math.inf

        decoupled, l2 = (self.weight_decay, 0.0) if self.adam_w_mode else (0.0, self.weight_decay)
        row = [
            self.lr,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            log_beta(self.beta1),
            log_beta(self.beta2),
            self.eps,
            l2,
            decoupled,
        ]
        return row + [0.0] * (int(HYPER_ROW) - len(row))


def adam_reference(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    steps: Sequence[float],
    hyper: Hyperparameters,
    divisor: float = 1.0,
) -> None:
    """One step in place, vectorised over the list; all tensors on one device, and one dtype in each list.

    On a CPU it works through batches that stay in the cache, so that its eight passes do not each go to memory: twice
    as fast as torch.optim.AdamW(foreach=True) on 29 M parameters and one core.

    Args:
        masters: fp32 weights to update instead of the parameters, which then receive a copy; empty without masters.
        steps: the number of this step for each parameter, from 1.
        divisor: of the gradients.
    """
    limit = BATCH if parameters and parameters[0].device.type == "cpu" else sys.maxsize
    lists = [parameters, gradients, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]
    batch: list[tuple[Sequence[Tensor], float]] = []
    elements = 0
    for tensors, step in zip(zip(*lists, strict=True), steps, strict=True):
        for piece in _pieces(tensors, limit):
            batch.append((piece, step))
            elements += piece[0].numel()
            if elements >= limit:
                _reference_batch(batch, hyper, divisor)
                batch, elements = [], 0
    if elements:
        _reference_batch(batch, hyper, divisor)


def _pieces(tensors: Sequence[Tensor], limit: int) -> Iterable[Sequence[Tensor]]:
    """The tensors of one parameter, cut into stretches of memory where they are long and lie alike."""
    first = tensors[0]
    if first.numel() > limit and is_dense(first) and all(t.stride() == first.stride() for t in tensors):
        return zip(*(flat(t).split(limit) for t in tensors), strict=True)
    return [tensors] if first.numel() else []


def _reference_batch(batch: Sequence[tuple[Sequence[Tensor], float]], hyper: Hyperparameters, divisor: float) -> None:
    steps = [step for _, step in batch]
    stored_w, stored_g, stored_m, stored_v, *masters = (list(one) for one in zip(*(t for t, _ in batch), strict=True))
    dtype = torch.float64 if stored_w[0].dtype == torch.float64 else torch.float32
    w = masters[0] if masters else _in_dtype(stored_w, dtype)
    g, m, v = (_in_dtype(stored, dtype) for stored in (stored_g, stored_m, stored_v))
    if divisor != 1.0:
        g = list(torch._foreach_div(g, divisor))
    if hyper.weight_decay and not hyper.adam_w_mode:
        g = list(torch._foreach_add(g, w, alpha=hyper.weight_decay))
    if hyper.weight_decay and hyper.adam_w_mode:
        torch._foreach_mul_(w, 1 - hyper.lr * hyper.weight_decay)
    torch._foreach_lerp_(m, g, 1 - hyper.beta1)
    torch._foreach_mul_(v, hyper.beta2)
    torch._foreach_addcmul_(v, g, g, 1 - hyper.beta2)
    corrections = [
        (1 - hyper.beta1**step, math.sqrt(1 - hyper.beta2**step)) if hyper.bias_correction else (1.0, 1.0)
        for step in steps
    ]
    # m / (√v / c + eps) is c · m / (√v + eps · c): one pass over memory less.
    eps = [hyper.eps * second for _, second in corrections]
    step_sizes = [-hyper.lr * second / first for first, second in corrections]
    denominator = torch._foreach_sqrt(v)
    if len(set(corrections)) == 1:  # one number for all costs the host less than a list
        torch._foreach_add_(denominator, eps[0])
        torch._foreach_addcdiv_(w, m, denominator, step_sizes[0])
    else:
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(w, m, denominator, step_sizes)
    for stored, computed in ((stored_m, m), (stored_v, v), (stored_w, w)):
        if stored is not computed:
            torch._foreach_copy_(stored, computed)


def _in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The list itself where it has this dtype; all of a list have one."""
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


@triton.jit
def _bias_correction(step, log_beta):
    """1 − β^step to fp32's last places, though β is near 1: the series where the difference would cancel."""
    x = step * log_beta
    y = tl.maximum(x, -0.5)
    series = 1 + y / 8 * (1 + y / 9 * (1 + y / 10))
    series = 1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7 * series)))
    series = -y * (1 + y / 2 * (1 + y / 3 * series))
    return tl.where(x > -0.5, series, 1 - tl.exp(x))


@triton.jit
def _update(
    parameter, gradient, exp_avg, exp_avg_sq, master, at, at_parameter, at_gradient, mask,
    inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient + at_gradient, mask=mask).to(tl.float32) * inverse
    m = tl.load(exp_avg + at, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=mask).to(tl.float32)
    weight, at_weight = (master, at) if HAS_MASTER else (parameter, at_parameter)
    w = tl.load(weight + at_weight, mask=mask).to(tl.float32)
    g += l2 * w
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    w = w * keep - step_size * (m / (tl.sqrt(v) * inverse_root + eps))
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
    tl.store(parameter + at_parameter, w.to(parameter.dtype.element_ty), mask=mask)
    if HAS_MASTER:
        tl.store(master + at, w, mask=mask)


@triton.jit(
    do_not_specialize=["tensors", "chunks", "is_counting"],
    do_not_specialize_on_alignment=["divisor", "skip"],
)
def _adam_kernel(
    rows,  # (rows, tensors) int64: the table
    tensors,  # columns of the table
    chunk_tensor,  # (chunks,) int32
    chunks,
    dims,  # (n, 3) int64
    hyper,  # (groups, HYPER_ROW) fp32
    steps_before,  # (n,) fp32: a copy of `steps`, since programs end while others begin
    steps,  # (n,) fp32, written
    divisor,  # fp32, of the gradients
    skip,  # fp32, not 0: change nothing
    counters,  # (2,) int64: steps applied and skipped
    is_counting,  # 1 in the one launch of a step that counts
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    MOMENT_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    IS_GATED: tl.constexpr,  # divisor and skip are there
    IS_STRIDED: tl.constexpr,  # some parameters are
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNK)
    is_skipped = tl.full([], 0.0, tl.float32)
    inverse = tl.full([], 1.0, tl.float32)
    if IS_GATED:
        is_skipped = tl.where(tl.load(skip) == 0.0, 0.0, 1.0)
        inverse = 1.0 / tl.load(divisor)

    # The first programs keep the counts, CHUNK parameters each.
    if pid * CHUNK < tensors:
        tensor = pid * CHUNK + lanes
        mask = tensor < tensors
        has_gradient = tl.load(rows + tensors * GRADIENT + tensor, mask=mask, other=0) != 0
        place = tl.load(rows + tensors * STEP + tensor, mask=mask, other=0)
        before = tl.load(steps_before + place, mask=mask, other=0.0)
        tl.store(steps + place, before + (1.0 - is_skipped), mask=mask & has_gradient)
        if (pid == 0) & (is_counting != 0):
            counter = counters + is_skipped.to(tl.int32)
            tl.store(counter, tl.load(counter) + 1)

    if pid < chunks:
        tensor = tl.load(chunk_tensor + pid)
        gradient_address = tl.load(rows + tensors * GRADIENT + tensor)
        if (gradient_address != 0) & (is_skipped == 0.0):
            numel = tl.load(rows + tensors * NUMEL + tensor)
            first_chunk = tl.load(rows + tensors * FIRST_CHUNK + tensor)
            gradient = gradient_address.to(tl.pointer_type(GRADIENT_DTYPE))
            parameter = tl.load(rows + tensors * PARAMETER + tensor).to(tl.pointer_type(PARAMETER_DTYPE))
            exp_avg = tl.load(rows + tensors * EXP_AVG + tensor).to(tl.pointer_type(MOMENT_DTYPE))
            exp_avg_sq = tl.load(rows + tensors * EXP_AVG_SQ + tensor).to(tl.pointer_type(MOMENT_DTYPE))
            master = tl.load(rows + tensors * MASTER + tensor).to(tl.pointer_type(tl.float32))

            group = hyper + tl.load(rows + tensors * GROUP + tensor) * HYPER_ROW
            lr = tl.load(tl.load(rows + tensors * LEARNING_RATE + tensor).to(tl.pointer_type(tl.float32)))
            step = tl.load(steps_before + tl.load(rows + tensors * STEP + tensor)) + 1.0
            one_minus_beta1 = tl.load(group + 1)
            beta2 = tl.load(group + 2)
            one_minus_beta2 = tl.load(group + 3)
            step_size = lr / _bias_correction(step, tl.load(group + 4))
            inverse_root = 1.0 / tl.sqrt(_bias_correction(step, tl.load(group + 5)))
            eps = tl.load(group + 6)
            l2 = tl.load(group + 7)
            keep = 1.0 - lr * tl.load(group + 8)

            start = (pid - first_chunk) * CHUNK
            is_plain = start + CHUNK <= numel
            first_dim = tl.full([], 0, tl.int64)
            dim_count = tl.full([], 0, tl.int64)
            if IS_STRIDED:
                first_dim = tl.load(rows + tensors * FIRST_DIM + tensor)
                dim_count = tl.load(rows + tensors * DIM_COUNT + tensor)
                is_plain = is_plain & (dim_count == 0)
            if is_plain:
                at = tl.multiple_of(start, 16) + lanes
                _update(
                    tl.multiple_of(parameter, 16), tl.multiple_of(gradient, 16), tl.multiple_of(exp_avg, 16),
                    tl.multiple_of(exp_avg_sq, 16), tl.multiple_of(master, 16), at, at, at, None,
                    inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps,
                    HAS_MASTER,
                )  # fmt: skip
            else:
                at = start + lanes
                mask = at < numel
                at_parameter = at
                at_gradient = at
                if dim_count != 0:
                    at_parameter, at_gradient = strided_offsets(at, dims, first_dim, dim_count)
                _update(
                    parameter, gradient, exp_avg, exp_avg_sq, master, at, at_parameter, at_gradient, mask,
                    inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps,
                    HAS_MASTER,
                )  # fmt: skip


@dataclass(frozen=True)
class AdamSignature:
    """What the parameters of one launch have in common."""

    device: torch.device
    parameter: torch.dtype
    gradient: torch.dtype
    moment: torch.dtype
    has_master: bool

    def unsupported(self) -> str | None:
        """Why the kernel cannot take them, or None."""
        if (self.parameter, self.gradient) not in DTYPE_PAIRS:
            parameter, gradient = (str(dtype).removeprefix("torch.") for dtype in (self.parameter, self.gradient))
            return f"{gradient} gradients of {parameter} parameters"
        if self.moment not in MOMENT_DTYPES:
            return f"{str(self.moment).removeprefix('torch.')} moments"
        return None


#: Warps a program; see BLOCK.
WARPS = 4


def launch_adam(
    signature: AdamSignature,
    table: TensorTable,
    hyper: Tensor,
    steps_before: Tensor,
    steps: Tensor,
    counters: Tensor,
    *,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
    is_counting: bool = False,
) -> None:
    """One update launch. The caller has copied `steps` to `steps_before`; divisor and skip come both or not at all."""
    launch(
        _adam_kernel,
        (max(table.chunks, -(-table.count // BLOCK)),),
        table.device,
        table.rows,
        table.count,
        table.chunk_tensor,
        table.chunks,
        table.dims,
        hyper,
        steps_before,
        steps,
        steps if divisor is None else divisor,
        steps if skip is None else skip,
        counters,
        int(is_counting),
        PARAMETER_DTYPE=KERNEL_DTYPES[signature.parameter],
        GRADIENT_DTYPE=KERNEL_DTYPES[signature.gradient],
        MOMENT_DTYPE=MOMENT_DTYPES[signature.moment],
        HAS_MASTER=signature.has_master,
        IS_GATED=divisor is not None,
        IS_STRIDED=table.is_strided,
        CHUNK=BLOCK,
        num_warps=WARPS,
    )


def adam_rows(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    learning_rate: int,
    group: int,
    step: int,
) -> tuple[list[Tensor], tuple[int, ...]]:
    """What `tensor_table.entry` needs of a parameter: the tensors, and the rows after their addresses."""
    tensors = [parameter, exp_avg, exp_avg_sq]
    rows = (learning_rate, group, step)
    if master is None:
        return tensors, (0, *rows)
    return [*tensors, master], rows


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
    device = parameters[0].device
    by_signature: dict[AdamSignature, list[int]] = {}
    for i, parameter in enumerate(parameters):
        signature = AdamSignature(device, parameter.dtype, gradients[i].dtype, exp_avgs[i].dtype, bool(masters))
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
        masters: n fp32 tensors like exp_avgs, updated in the parameters' stead; or none.
        divisor: 0-d, of the gradients.
        skip: 0-d; where it is not 0, nothing changes.

    No wait for the device, except in the reference on a GPU. FusedAdam keeps its table of addresses between steps and
    costs the host less.
    Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    lr = lr if isinstance(lr, Tensor) else torch.tensor(lr)
    _adam_op(
        list(parameters), list(gradients), list(exp_avgs), list(exp_avg_sqs), list(masters), list(steps), lr,
        beta1, beta2, eps, weight_decay, adam_w_mode, bias_correction, divisor, skip,
    )  # fmt: skip


def _prove(device: torch.device) -> list[Proof]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    proofs = []
    for dtype in KERNEL_DTYPES:
        has_master = dtype != torch.float32
        weights = [random(33, 65), random(1024), random(7, 9).t(), random(2049)[1:]]
        gradients = [torch.randn(w.shape, generator=generator).to(device, dtype) for w in weights]
        moments = [(torch.empty_like(w).copy_(w / 9), torch.empty_like(w).copy_(w * w)) for w in weights]
        masters = [torch.empty_like(w).copy_(w) for w in weights] if has_master else []
        ours, theirs = (
            [[t.detach().clone() for t in one] for one in (weights, *zip(*moments, strict=True), masters)]
            for _ in range(2)
        )
        steps = [torch.full((), 3.0, device=device) for _ in weights]
        parameters = [w.to(dtype) for w in weights] if has_master else ours[0]
        adam_(parameters, gradients, ours[1], ours[2], steps, lr=0.01, masters=ours[3], weight_decay=0.1)
        expected = [w.to(dtype) for w in weights] if has_master else theirs[0]
        hyper = Hyperparameters(0.01, 0.9, 0.999, 1e-8, 0.1)
        adam_reference(expected, gradients, theirs[1], theirs[2], theirs[3], [4.0] * len(weights), hyper)
        what = f"adam of {str(dtype).removeprefix('torch.')}{' with masters' if has_master else ''}"
        for name, got, wanted in (
            ("weights", ours[3] or parameters, theirs[3] or expected),
            ("moments", ours[1] + ours[2], theirs[1] + theirs[2]),
        ):
            flat = [torch.cat([t.reshape(-1) for t in one]) for one in (got, wanted)]
            proofs.append(Proof(f"{what}: {name}", relative_error(*flat), 1e-6))
    return proofs


def _compilations() -> Iterable[Compilation]:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    constants = (
        "PARAMETER_DTYPE",
        "GRADIENT_DTYPE",
        "MOMENT_DTYPE",
        "HAS_MASTER",
        "IS_GATED",
        "IS_STRIDED",
        "CHUNK",
    )
    signature = {
        "rows": "*i64",
        "tensors": "i32",
        "chunk_tensor": "*i32",
        "chunks": "i32",
        "dims": "*i64",
        "hyper": "*fp32",
        "steps_before": "*fp32",
        "steps": "*fp32",
        "divisor": "*fp32",
        "skip": "*fp32",
        "counters": "*i64",
        "is_counting": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = frozenset(n for n, kind in signature.items() if kind.startswith("*")) - {"divisor", "skip"}
    flags = (False, True)
    for (parameter, gradient), moment, has_master, is_gated, is_strided in product(
        DTYPE_PAIRS, MOMENT_DTYPES, flags, flags, flags
    ):
        if has_master and parameter == torch.float32:
            continue
        values = (
            KERNEL_DTYPES[parameter],
            KERNEL_DTYPES[gradient],
            MOMENT_DTYPES[moment],
            has_master,
            is_gated,
            is_strided,
            BLOCK,
        )
        label = f"{short[parameter]} parameters, {short[gradient]} gradients, {short[moment]} moments" + "".join(
            word
            for word, is_on in ((", masters", has_master), (", gated", is_gated), (", strided", is_strided))
            if is_on
        )
        yield Compilation(
            _adam_kernel, label, signature, dict(zip(constants, values, strict=True)), WARPS, divisible_by_16=aligned
        )


catalogue(Op("adam", "Adam and AdamW, all parameters in one launch", _prove, _compilations))
