"""Modules that ranks share compute what the whole module computes in one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusestep import nn
from fusestep.distributed.collectives import added, copied, gathered, joined, scattered, sliced
from fusestep.distributed.groups import shard_group
from fusestep.distributed.tensor_parallel import TensorParallel, own_stream
from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_autocast
from fusestep.nn import LinearCrossEntropy
from fusestep.optim import FusedAdam
from harness import near, run_ranks

WIDTH, FFN, HEADS, BATCH, LENGTH = 24, 56, 8, 3, 12

#: Relative, of fp32 against float64.
TOLERANCE = 1e-6


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """The whole module with values that differ everywhere, norms and biases too; the same on all ranks."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (0.7 if parameter.dim() == 1 else 0.0))
    return module


def part_of(full: Tensor, how: Any, rank: int, size: int) -> Tensor:
    """The part of a parameter that a rank has: `how` is None for all, (dim, number of blocks) else."""
    if how is None:
        return full
    dim, blocks = how
    return torch.cat([block.chunk(size, dim)[rank] for block in full.split(blocks, dim)], dim)


def give(shared: torch.nn.Module, whole: torch.nn.Module, split: dict[str, Any], rank: int, size: int) -> None:
    """Load the parts of the whole module's parameters."""
    parts = {name: part_of(value, split.get(name), rank, size) for name, value in whole.state_dict().items()}
    shared.load_state_dict(parts)


def slice_of(x: Tensor, rank: int, size: int, dim: int | None) -> Tensor:
    return x if dim is None else x.chunk(size, dim)[rank]


def check(
    whole: torch.nn.Module,
    shared: torch.nn.Module,
    split: dict[str, Any],
    rank: int,
    size: int,
    *,
    enters: int | None = None,
    leaves: int | None = None,
    residual: bool = False,
    features: tuple[bool, bool] = (False, False),
    shape: tuple[int, ...] = (BATCH, LENGTH),
    **options: Any,
) -> None:
    """Outputs, input gradients and parameter gradients.

    `enters`, `leaves`: the dimension along which input and output are slices of a sequence; `features`: whether
    input and output are this rank's part of the features instead.
    """
    give(shared, randomised(whole), split, rank, size)
    width = whole.in_features if hasattr(whole, "in_features") else WIDTH
    x = torch.randn(*shape, width)
    inputs = [x, torch.randn_like(x)] if residual else [x]
    exact = copy.deepcopy(whole).double()
    exact_inputs = [one.double().requires_grad_() for one in inputs]
    mine = [one.chunk(size, -1)[rank] if features[0] else slice_of(one, rank, size, enters) for one in inputs]
    mine = [one.clone().requires_grad_() for one in mine]
    extra = [{"residual": tensors[1]} if residual else {} for tensors in (exact_inputs, mine)]
    wanted = exact(exact_inputs[0], **extra[0], **options)
    found = shared(mine[0], **extra[1], **options)
    wanted, found = (one if isinstance(one, tuple) else (one,) for one in (wanted, found))
    exact_gradients, gradients = [], []
    for place, (one, other) in enumerate(zip(wanted, found, strict=True)):
        upstream = torch.randn(one.shape)

        def own(full: Tensor, place: int = place) -> Tensor:
            if place == 0 and features[1]:
                return full.chunk(size, -1)[rank]
            return slice_of(full, rank, size, leaves if place == 0 else enters)

        assert error(other, own(one)) < near(TOLERANCE)
        exact_gradients.append(upstream.double())
        gradients.append(own(upstream))
    torch.autograd.backward(wanted, exact_gradients)
    torch.autograd.backward(found, gradients)
    for one, other in zip(exact_inputs, mine, strict=True):
        expected = one.grad.chunk(size, -1)[rank] if features[0] else slice_of(one.grad, rank, size, enters)
        assert error(other.grad, expected) < near(TOLERANCE)
    # In fp32 some gradients are the small rest of large sums: no better than one process has them.
    results = whole(inputs[0], **({"residual": inputs[1]} if residual else {}), **options)
    torch.autograd.backward(results, [one.float() for one in exact_gradients])
    names = dict(exact.named_parameters())
    assert names.keys() == dict(shared.named_parameters()).keys()
    for name, parameter in shared.named_parameters():
        expected = part_of(names[name].grad, split.get(name), rank, size)
        assert parameter.grad is not None, name
        usual = error(part_of(whole.get_parameter(name).grad, split.get(name), rank, size), expected)
        found_error = error(parameter.grad, expected)
        assert found_error < max(near(TOLERANCE), 4 * usual), (name, found_error, usual)


def linears(rank: int, size: int) -> None:
    group = dist.group.WORLD
    column = {"weight": (0, 40), "bias": (0, 40)}
    parts = {"a_weight": (0, 16), "b_weight": (0, 24), "a_bias": (0, 16), "b_bias": (0, 24)}
    for parallel, dim in ((False, None), (True, 0), (True, 1)):
        options: dict[str, Any] = {"tp_group": group, "sequence_parallel": parallel, "sequence_dim": dim or 0}
        whole = nn.Linear(WIDTH, 40)
        shared = nn.Linear(WIDTH, 40, parallel_mode="column", **options)
        shape = (LENGTH, BATCH) if dim == 0 else (BATCH, LENGTH)
        check(whole, shared, column, rank, size, enters=dim, features=(False, True), shape=shape)
        assert "column of" in repr(shared)

        whole = nn.Linear(WIDTH, 40, parameters_split={"a": 16, "b": 24})
        shared = nn.Linear(WIDTH, 40, parameters_split={"a": 16, "b": 24}, parallel_mode="column", **options)
        # The rows of a rank are its parts of a and b, so the features are not its slice of the whole's.
        give(shared, randomised(whole), parts, rank, size)
        x = torch.randn(*shape, WIDTH)
        y = shared(slice_of(x, rank, size, dim))
        assert error(y, torch.cat([half.chunk(size, -1)[rank] for half in whole(x).split((16, 24), -1)], -1)) < near(
            TOLERANCE
        )

        for bias in (True, False):
            whole = nn.Linear(40, WIDTH, bias)
            shared = nn.Linear(40, WIDTH, bias, parallel_mode="row", **options)
            check(whole, shared, {"weight": (1, 40)}, rank, size, leaves=dim, features=(True, False), shape=shape)

        for normalization in ("LayerNorm", "RMSNorm"):
            for residual in (False, True):
                norm: dict[str, Any] = {"normalization": normalization, "zero_centered_gamma": residual}
                whole = nn.LayerNormLinear(WIDTH, 40, return_layernorm_output=residual, **norm)
                shared = nn.LayerNormLinear(
                    WIDTH, 40, return_layernorm_output=residual, parallel_mode="column", **norm, **options
                )
                case: dict[str, Any] = {"enters": dim, "features": (False, True), "shape": shape, "residual": residual}
                check(whole, shared, column, rank, size, **case)

    row = nn.Linear(40, WIDTH, parallel_mode="row", tp_group=group, return_bias=True, sequence_parallel=True)
    x = torch.randn(BATCH, LENGTH, 40)
    y, bias = row(x.chunk(size, -1)[rank])
    (y + bias).sum().backward()
    assert torch.equal(row.bias.grad, torch.full((WIDTH,), float(BATCH * LENGTH)))


def blocks(rank: int, size: int) -> None:
    group = dist.group.WORLD
    for parallel, layout in ((False, "bshd"), (True, "sbhd"), (True, "bshd")):
        dim = {"sbhd": 0, "bshd": 1}[layout] if parallel else None
        shape = (LENGTH, BATCH) if layout == "sbhd" else (BATCH, LENGTH)
        options: dict[str, Any] = {"tp_group": group, "sequence_parallel": parallel}
        case: dict[str, Any] = {"enters": dim, "leaves": dim, "shape": shape}

        for activation in ("gelu", "swiglu"):
            gated = activation == "swiglu"
            for residual in (False, True):
                mlp: dict[str, Any] = {"activation": activation, "return_layernorm_output": residual}
                split = {"fc1_weight": (0, FFN), "fc1_bias": (0, FFN), "fc2_weight": (1, FFN)}
                whole = nn.LayerNormMLP(WIDTH, FFN, **mlp)
                shared = nn.LayerNormMLP(WIDTH, FFN, **mlp, **options, sequence_dim=dim or 0)
                assert shared.fc1_weight.shape[0] == (2 if gated else 1) * FFN // size
                check(whole, shared, split, rank, size, residual=residual, **case)

        for groups, fused, interleaved, cross in (
            (HEADS, True, False, False),
            (HEADS // 2, True, True, False),
            (HEADS // 2, False, False, False),
            (HEADS, True, True, True),
        ):
            rows_q, rows_k = HEADS * 6, groups * 6
            attention: dict[str, Any] = {
                "kv_channels": 6,
                "attention_dropout": 0.0,
                "num_gqa_groups": groups,
                "fuse_qkv_params": fused,
                "qkv_weight_interleaved": interleaved,
                "qkv_format": layout,
                "input_layernorm": not cross,
                "qk_norm_type": "RMSNorm",
                "attention_type": "cross" if cross else "self",
            }
            split = {"proj.weight": (1, rows_q)}
            if cross:
                split |= {f"query_layer.{what}": (0, rows_q) for what in ("weight", "bias")}
                split |= {f"key_value.{what}": (0, 2 * rows_k) for what in ("weight", "bias")}
            elif fused:
                rows = [rows_q + 2 * rows_k] if interleaved else [rows_q, rows_k, rows_k]
                split |= {f"layernorm_qkv.{what}": (0, rows) for what in ("weight", "bias")}
            else:
                for name, count in (("query", rows_q), ("key", rows_k), ("value", rows_k)):
                    split |= {f"layernorm_qkv.{name}_{what}": (0, count) for what in ("weight", "bias")}
            whole = nn.MultiheadAttention(WIDTH, HEADS, **attention)
            shared = nn.MultiheadAttention(WIDTH, HEADS, **attention, **options)
            if not cross:
                check(whole, shared, split, rank, size, residual=fused, **case)
                alibi = {"core_attention_bias_type": "alibi"}
                check(whole, shared, split, rank, size, residual=fused, **case, **alibi)
                continue
            give(shared, randomised(whole), split, rank, size)
            x, memory = torch.randn(*shape, WIDTH), torch.randn(*shape, WIDTH)
            found = shared(slice_of(x, rank, size, dim), encoder_output=slice_of(memory, rank, size, dim))
            assert error(found, slice_of(whole(x, encoder_output=memory), rank, size, dim)) < near(TOLERANCE)

        split = {"self_attention.proj.weight": (1, WIDTH), "layernorm_mlp.fc2_weight": (1, FFN)}
        split |= {f"self_attention.layernorm_qkv.{what}": (0, [WIDTH] * 3) for what in ("weight", "bias")}
        split |= {f"layernorm_mlp.fc1_{what}": (0, FFN) for what in ("weight", "bias")}
        for ends in (False, True):
            if ends:
                split = {name.replace("layernorm_qkv", "qkv"): how for name, how in split.items()}
            layer: dict[str, Any] = {
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "fuse_qkv_params": True,
                "qkv_weight_interleaved": False,
                "attn_input_format": layout,
                "output_layernorm": ends,
                "parallel_attention_mlp": ends,
            }
            whole = nn.TransformerLayer(WIDTH, FFN, HEADS, **layer)
            shared = nn.TransformerLayer(WIDTH, FFN, HEADS, **layer, **options)
            check(whole, shared, split, rank, size, residual=not ends, **case)


def initial_values(rank: int, size: int) -> None:
    """Parts of the matrices that one process would have drawn from the same seed, by any initialiser."""
    for method in (None, torch.nn.init.xavier_normal_):
        options: dict[str, Any] = {"init_method": method, "fuse_qkv_params": True, "qkv_weight_interleaved": False}
        made = []
        for group in (None, dist.group.WORLD):
            torch.manual_seed(3)
            made.append(nn.TransformerLayer(WIDTH, FFN, HEADS, activation="swiglu", tp_group=group, **options))
        whole, shared = (dict(one.named_parameters()) for one in made)
        qkv, fc1 = "self_attention.layernorm_qkv.weight", "layernorm_mlp.fc1_weight"
        assert torch.equal(shared[qkv], part_of(whole[qkv], (0, WIDTH), rank, size))
        assert torch.equal(shared[fc1], part_of(whole[fc1], (0, FFN), rank, size))
        proj, fc2 = "self_attention.proj.weight", "layernorm_mlp.fc2_weight"
        assert torch.equal(shared[proj], part_of(whole[proj], (1, WIDTH), rank, size))
        assert torch.equal(shared[fc2], part_of(whole[fc2], (1, FFN), rank, size))
        assert shared[fc2].partition_dim == 1
        assert shared[fc1].partition_dim == 0
        assert not hasattr(shared["layernorm_mlp.layer_norm_weight"], "partition_dim")
        assert torch.equal(torch.rand(3), torch.rand(3)) is False  # the streams went on


def collectives(rank: int, size: int) -> None:
    """Each against its formula, and their second derivatives, in float64."""
    group = dist.group.WORLD
    everywhere = torch.randn(size, 4 * size, 6, dtype=torch.float64)
    for dim in (0, 1):
        if everywhere.shape[dim + 1] % size:
            continue
        mine = everywhere[rank].clone().requires_grad_()
        upstream = torch.randn(size, 4 * size, 6, dtype=torch.float64)
        assert error(added(mine, group), everywhere.sum(0)) < 1e-12
        assert torch.equal(gathered(mine, dim, group), torch.cat(list(everywhere), dim))
        assert torch.equal(joined(mine, dim, group), torch.cat(list(everywhere), dim))
        assert error(scattered(mine, dim, group), everywhere.sum(0).chunk(size, dim)[rank]) < 1e-12
        assert torch.equal(sliced(mine, dim, group), mine.chunk(size, dim)[rank])
        (gradient,) = torch.autograd.grad(copied(mine, group), mine, upstream[rank])
        assert error(gradient, upstream.sum(0)) < 1e-12
        # Σ over ranks of f(gathered) for a cubic f: each rank's first and second derivatives.
        weights = upstream.sum(0)
        everything = torch.cat(list(everywhere), dim).requires_grad_()
        shares = torch.cat([weights * (1 + one) for one in range(size)], dim)

        def cubic(x: Tensor, factor: Tensor) -> Tensor:
            return (factor * x**3).sum()

        (first,) = torch.autograd.grad(cubic(gathered(mine, dim, group), shares), mine, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), mine)
        assert error(first, (3 * size * shares * everything**2).chunk(size, dim)[rank]) < 1e-12
        assert error(second, (6 * size * shares * everything).chunk(size, dim)[rank]) < 1e-12


def dropout(rank: int, size: int) -> None:
    """The same on all ranks where they hold the same, different where each has a part; from the generator's state."""
    torch.manual_seed(11)
    device = torch.device("cpu")
    with own_stream("test", rank, device):
        own = torch.rand(50)
    together = torch.rand(50)
    draws = joined(torch.stack((own, together))[None], 0, dist.group.WORLD)
    assert all(torch.equal(draws[0, 1], one[1]) for one in draws)
    assert len({tuple(one[0].tolist()) for one in draws}) == size
    torch.manual_seed(11)
    with own_stream("test", rank, device):
        assert torch.equal(torch.rand(50), own)
    assert torch.equal(torch.rand(50), together)

    for parallel in (False, True):
        layer = nn.TransformerLayer(
            WIDTH, FFN, HEADS, hidden_dropout=0.4, attention_dropout=0.0, tp_group=dist.group.WORLD,
            sequence_parallel=parallel,
        )  # fmt: skip
        torch.manual_seed(5)
        x = torch.randn(1, 4, WIDTH)
        y, _ = layer(x, return_residual=True)
        zeros = joined((y == 0).float(), 0, dist.group.WORLD)
        assert 0.2 < float(zeros.mean()) < 0.6
        assert all(torch.equal(zeros[0], one) for one in zeros[1:]) is not parallel
    attention = nn.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.5, tp_group=dist.group.WORLD)
    attended: list[Tensor] = []
    attention.core_attention.register_forward_hook(lambda *results: attended.append(results[-1]))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.fill_(0.1)  # all heads alike
    attention(torch.randn(1, 16, WIDTH))
    heads = joined(attended[0], 0, dist.group.WORLD)
    assert not any(torch.equal(heads[0], one) for one in heads[1:])
    after = joined(torch.rand(1, 9), 0, dist.group.WORLD)
    assert all(torch.equal(after[0], one) for one in after)


def fp8(rank: int, size: int) -> None:
    """In FP8: as near to float64 as one process is, whose casts it has but for the scales of parts of a tensor."""
    group = dist.group.WORLD
    for recipe in (Float8CurrentScaling(), DelayedScaling(amax_history_len=4), Float8BlockScaling()):
        for parallel in (False, True):
            layer: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
            made = []
            for part in (None, group):
                torch.manual_seed(7)
                made.append(nn.TransformerLayer(64, 128, 4, tp_group=part, sequence_parallel=parallel, **layer))
            whole, shared = made
            exact = copy.deepcopy(whole).double()
            dim = 1 if parallel else None
            for _ in range(2):
                x, upstream = torch.randn(2, 48, 64), torch.randn(2, 48, 64)
                results = []
                for module, cut in ((exact, None), (whole, None), (shared, dim)):
                    exactly = module is exact
                    given = slice_of(x.double() if exactly else x, rank, size, cut).clone().requires_grad_()
                    with fp8_autocast(enabled=not exactly, recipe=recipe):
                        y = module(given)
                    y.backward(slice_of(upstream.to(y.dtype), rank, size, cut))
                    assert given.grad is not None
                    results.append([y - given, given.grad - slice_of(upstream, rank, size, cut)])
                for name in ("self_attention.layernorm_qkv.layer_norm_weight", "layernorm_mlp.fc2_bias"):
                    for found, module in zip(results, (exact, whole, shared), strict=True):
                        found.append(module.get_parameter(name).grad)
                for place, (wanted, usual, found) in enumerate(zip(*results, strict=True)):
                    if place < 2:
                        wanted, usual = (slice_of(one, rank, size, dim) for one in (wanted, usual))
                    assert error(found, wanted) < 1.3 * error(usual, wanted) + near(TOLERANCE), place
                    assert error(found, wanted) < 0.1, place


def steps(rank: int, size: int) -> None:
    """An optimizer that clips by the norm of the whole model's gradient leaves the ranks' parts as one process's."""
    split = {"self_attention.proj.weight": (1, WIDTH), "layernorm_mlp.fc2_weight": (1, FFN)}
    split |= {f"self_attention.layernorm_qkv.{name}_{what}": (0, WIDTH)
              for name in ("query", "key", "value") for what in ("weight", "bias")}  # fmt: skip
    split |= {f"layernorm_mlp.fc1_{what}": (0, FFN) for what in ("weight", "bias")}
    for parallel in (False, True):
        norms, made = [], []
        for group in (None, dist.group.WORLD):
            torch.manual_seed(9)
            layer = nn.TransformerLayer(
                WIDTH, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, tp_group=group, sequence_parallel=parallel
            )
            optimizer = FusedAdam(layer.parameters(), lr=1e-2, max_grad_norm=0.3)
            dim = 1 if parallel and group is not None else None
            for _ in range(4):
                x = torch.randn(BATCH, LENGTH, WIDTH)
                y = layer(slice_of(x, rank, size, dim))
                optimizer.zero_grad()
                (y * slice_of(x.flip(0), rank, size, dim)).mean().mul(1 if dim is None else 1 / size).backward()
                optimizer.step()
                norms.append(float(optimizer.last_grad_norm))
            made.append(layer)
        assert norms[4:] == pytest.approx(norms[:4], rel=1e-5)
        whole = dict(made[0].named_parameters())
        for name, parameter in made[1].named_parameters():
            if name.endswith("key_bias"):
                continue  # its gradient is 0, of whose rounding Adam makes whole steps
            assert error(parameter, part_of(whole[name], split.get(name), rank, size)) < 1e-5, name


def compiled(rank: int, size: int) -> None:
    """torch.compile gives the results of the layer as it is; in FP8 to a rounding."""
    for parallel in (False, True):
        layer = nn.TransformerLayer(
            WIDTH, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, tp_group=dist.group.WORLD,
            sequence_parallel=parallel,
        )  # fmt: skip
        x = slice_of(torch.randn(BATCH, LENGTH, WIDTH), rank, size, 1 if parallel else None)
        for recipe, allowed in ((None, 1e-7), (Float8CurrentScaling(), 1e-2)):
            results = []
            for module in (layer, torch.compile(layer, backend="aot_eager")):
                given = x.clone().requires_grad_()
                with fp8_autocast(enabled=recipe is not None, recipe=recipe):
                    y = module(given)
                layer.zero_grad()
                y.square().sum().backward()
                assert given.grad is not None
                results.append([y, given.grad, *[one.grad for one in layer.parameters()]])
            for found, wanted in zip(results[1][:2], results[0][:2], strict=True):
                assert error(found, wanted) < allowed
            if recipe is None:
                assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(*results, strict=True))


def mistakes(rank: int, size: int) -> None:
    """One sentence with the mend, on every rank, before anything is sent."""
    group = dist.group.WORLD
    other = dist.new_group([0])

    def told(call: Callable[[], Any], *words: str) -> None:
        with pytest.raises(UserError) as caught:
            call()
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert message.count(". ") == 0, message

    told(lambda: nn.Linear(8, 8 * size + 1, parallel_mode="column", tp_group=group), "out_features", f"{size} ranks")
    told(lambda: nn.Linear(8 * size + 1, 8, parallel_mode="row", tp_group=group), "in_features", "choose a multiple")
    told(lambda: nn.Linear(8, 8, parallel_mode="rows", tp_group=group), "'rows'", "'column' or 'row'")
    told(lambda: nn.LayerNormLinear(8, 8, parallel_mode="row", tp_group=group), "'row'", "'column'")
    told(lambda: nn.LayerNormMLP(8, 8 * size + 1, tp_group=group), "ffn_hidden_size", "choose a multiple")
    told(lambda: nn.MultiheadAttention(24, 3, tp_group=group), "num_attention_heads 3")
    told(lambda: nn.MultiheadAttention(24, 2 * size, num_gqa_groups=1, tp_group=group), "num_gqa_groups 1")
    if rank:
        told(lambda: nn.Linear(8, 8, parallel_mode="column", tp_group=other), f"rank {rank} is not in the tp_group")
    told(lambda: nn.Linear(8, 8, parallel_mode="column", tp_group="tp"), "is not in the tp_group")
    parallel = TensorParallel("Linear", None, 3)
    told(lambda: parallel.group, "set_tensor_parallel_group")
    told(lambda: parallel.join(group), "made for 3 ranks")
    row = nn.Linear(4 * size, 8, parallel_mode="row", tp_group=group, sequence_parallel=True)
    told(lambda: row(torch.ones(2, size * 3 + 1, 4)), "sequence", "pad it")
    told(lambda: row(torch.ones(size * 2, 4)), "no dimension 1")
    column = nn.Linear(4, 4 * size, parallel_mode="column", tp_group=group, sequence_parallel=True)
    told(lambda: column(torch.ones(size * 2, 4)), "sequence_dim")
    with pytest.raises(UserError, match="cannot be pickled"):
        torch.save(nn.RMSNorm(4, tp_group=group), "/dev/null")
    # A copy is shared by the same ranks, and optimizers know its parts.
    mlp = nn.LayerNormMLP(4, 4 * size, tp_group=group)
    for module, parts in ((column, 2), (mlp, 3), (LinearCrossEntropy(4, 4 * size, tp_group=group), 2)):
        for one in (module, copy.deepcopy(module)):
            assert one._parallel is module._parallel
            assert sum(shard_group(parameter) is group for parameter in one.parameters()) == parts
    # A group of one, or none, changes nothing.
    if rank == 0:
        alone = nn.Linear(4, 4, parallel_mode="column", tp_group=other, sequence_parallel=True)
        assert alone._parallel is None
    assert nn.Linear(4, 4, parallel_mode="row")._parallel is None


def checks(rank: int, size: int, names: list[str]) -> None:
    for name in names:
        torch.manual_seed(1234)
        globals()[name](rank, size)


#: What differs between two and four ranks, and what does not.
QUICK = ["linears", "initial_values", "collectives", "mistakes"]
LONG = ["blocks", "dropout", "fp8", "steps"]


@pytest.mark.usefixtures("ranks_device")
def test_two_ranks_compute_what_one_does() -> None:
    run_ranks(checks, 2, 2, QUICK + LONG)


def test_four_ranks_compute_what_one_does() -> None:
    run_ranks(checks, 4, 4, QUICK)


@pytest.mark.endurance
def test_blocks_of_four_ranks_compute_what_one_does() -> None:
    run_ranks(checks, 4, 4, [*LONG, "compiled"], timeout=300)


def test_a_group_is_wanted_before_torch_has_any() -> None:
    with pytest.raises(UserError, match="init_process_group"):
        nn.Linear(8, 8, parallel_mode="column", tp_group=object())
