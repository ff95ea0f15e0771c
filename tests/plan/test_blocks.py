"""What a plan charges a block for is what the model's code keeps and moves: counted here as it runs on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusestep.fp8 import DelayedScaling, fp8_autocast
from fusestep.models import GPT, GPTConfig
from fusestep.models.config import Form
from fusestep.plan import Shape, Work
from fusestep.plan import passes as plan_passes
from fusestep.plan.memory import checkpointed, kept_of_layer
from fusestep.plan.work import Precision

#: Many tokens for a narrow model, so that what weights take is little beside what tokens take.
WIDTH, FFN, BATCH, TOKENS = 48, 160, 64, 60

#: Rearranges nothing; and the products and attention, which a plan counts apart.
VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"}
VIEWS |= {"detach", "alias", "as_strided", "unbind", "split", "split_with_sizes", "chunk", "_reshape_alias"}
VIEWS |= {"unflatten", "lift_fresh"}
APART = {"mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"}
APART |= {"_scaled_dot_product_flash_attention_for_cpu_backward"}


class Moved(TorchDispatchMode):
    """Sums the bytes of all operands and results, products and attention apart, and counts the operations.

    Gradients that are added to older ones are no part of a step, and not among the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name not in VIEWS | APART:
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
            self.bytes += sum(one.numel() * one.element_size() for one in tensors)
            self.operations += name != "add_"
        return result


def of_one_layer(form: Form, precision: Precision, *, recomputes: bool = False) -> tuple[float, float, int]:
    """(bytes kept for backward, bytes moved) of a block for a token, and its operations: two layers less one."""
    kept, moved, operations = [], [], []
    for layers in (1, 2):
        config = GPTConfig(vocab_size=96, width=WIDTH, heads=4, layers=layers, ffn_width=FFN, context=TOKENS, form=form)
        torch.manual_seed(0)
        model = GPT(config)
        model.checkpoint_blocks = recomputes
        tokens = torch.randint(96, (BATCH, TOKENS))
        own = {one.untyped_storage().data_ptr() for one in model.parameters()}
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, own: set[int] = own, sizes: dict[int, int] = sizes) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        def loss(model: GPT = model, tokens: Tensor = tokens) -> Tensor:
            autocast = torch.autocast("cpu", torch.bfloat16) if precision != "fp32" else nullcontext()
            with autocast, fp8_autocast(recipe=DelayedScaling()) if precision == "fp8" else nullcontext():
                return model.loss(tokens, tokens)

        loss().backward()  # the first use of FP8 chooses scales
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = loss()
        kept.append(sum(sizes.values()))
        result.backward()
        with Moved() as counted:
            loss().backward()
        moved.append(counted.bytes)
        operations.append(counted.operations)
    count = BATCH * TOKENS
    return (kept[1] - kept[0]) / count, (moved[1] - moved[0]) / count, operations[1] - operations[0]


def planned(form: Form, precision: Precision, **options: Any) -> Work:
    shape = Shape(vocab_size=96, width=WIDTH, heads=4, layers=2, ffn_width=FFN, context=TOKENS)
    return Work(shape, batch=BATCH, form=form, precision=precision, **options)


#: Copies of a block's weights, and statistics of norms, are counted with what tokens keep: at most so much of it.
KEPT_WITHIN = 0.05
#: Casts of weights, and statistics: about 4 bytes a token for each number of the width, of 118 in the fused form.
MOVED_WITHIN = 0.04


@pytest.mark.parametrize(
    ("form", "precision"),
    [(form, precision) for form in ("seed", "plain", "fused") for precision in ("fp32", "bf16")] + [("fused", "fp8")],
)
def test_a_block_keeps_and_moves_what_the_plan_says(form: Form, precision: Precision) -> None:
    work = planned(form, precision)
    kept, moved, operations = of_one_layer(form, precision)
    assert kept == pytest.approx(kept_of_layer(work), rel=KEPT_WITHIN)
    if precision == "fp8":  # which is emulated on a CPU, in many more passes
        return
    there, back = plan_passes.forward(work), plan_passes.backward(work)
    assert there.casts == back.casts == 0
    # On a CPU the fused form sums up the bias of the MLP's first layer apart, and a norm's backward is one operation.
    apart = work.element * FFN if form == "fused" else 0
    assert moved == pytest.approx(there.bytes + back.bytes + apart, rel=MOVED_WITHIN)
    if (form, precision) != ("fused", "bf16"):  # whose weights are cast here, and copies that the optimizer wrote there
        assert operations == there.kernels + back.kernels - 2 + (form == "fused")


def test_casts_to_fp8_are_counted_by_what_they_read_and_write() -> None:
    W, H, Q = WIDTH, FFN, 3 * WIDTH
    work = planned("fused", "fp8")
    there, back = plan_passes.forward(work), plan_passes.backward(work)
    # Numbers of 2 bytes become two of 1, as they lie and transposed: attention's output and the activation; gradients
    # of both branches, of queries, keys and values, and the activation's, which is computed from two tensors.
    assert there.casts == 4 * W + (2 * H + 2 * H)
    assert back.casts == 2 * 4 * W + 4 * Q + (2 * H + 2 * H + 2 * H)
    # Norms read a branch and the FP32 stream, write the stream and FP8, which is transposed later; backward they read
    # a gradient of the branch and two of the stream, and the stream, and write both.
    assert there.bytes == 2 * (2 + 4 + 4 + 1) * W
    assert back.bytes == 2 * 2 * W + 2 * (2 + 3 * 4 + 2) * W
    searched = planned("fused", "fp8", recipe="current")
    more, more_back = plan_passes.forward(searched), plan_passes.backward(searched)
    # What is cast is read once more, before.
    assert more.casts - there.casts == 2 * (W + H)
    assert more_back.casts - back.casts == 2 * (2 * W + Q + 2 * H)
    assert more.bytes - there.bytes == 2 * (2 + 4) * W
    assert (more.kernels - there.kernels, more_back.kernels - back.kernels) == (4, 4)


def test_a_recomputed_block_keeps_its_input() -> None:
    work = planned("plain", "bf16", activation_checkpointing=True)
    kept, _, _ = of_one_layer("plain", "bf16", recomputes=True)
    assert kept == pytest.approx(checkpointed(work), rel=KEPT_WITHIN)
