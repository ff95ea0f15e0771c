"""TrainStep: forward, backward, clip and optimizer as one CUDA graph.

A small model's step is bound by the host, which cannot launch its kernels as fast as the GPU runs them. A CUDA graph
holds all launches of a step and starts them at once. What has to be right for that, and is done here:

1. The first steps of each batch shape run one launch at a time (on a stream of their own, as torch asks), so that
   everything which is chosen or allocated once has been. They are steps of the training like any other, and leave no
   memory behind that the graph could have had (segments.py).
2. Then the step is captured: Python runs once more, launching nothing, and the graph takes the step's place. From here
   on a call copies its batch to where the graph reads it, replays, and returns a copy of the loss.
3. What the graph has baked in is compared before each replay (baked.py, and outside.py for what loss_fn reads that is
   neither the model's nor the batch's): modules, their plain attributes and hooks,
   parameters and buffers (which, where, trained or not), the optimizer's options and state, and that slots of FP8 which
   had a scale at the capture still have one (fp8/settled.py): their casts were captured without the pass that looks for
   an amax. Where it changed, the graphs are dropped and the step warms up and captures anew. A learning rate may change
   freely: it lies on the device.
4. Where a graph cannot be had (no GPU, an optimizer that waits for the device, code of the user's that does, something
   that changes in each step on the host, watch.py) the same step runs one launch at a time, which is announced with the
   reason.

Graphs of several batch shapes share one pool of memory, since one replays at a time.

Source: PyTorch documentation, "CUDA Graphs" (whole-network capture).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch, hardware
from fusestep.errors import UserError
from fusestep.fp8.context import fp8_autocast
from fusestep.fp8.recipes import Recipe
from fusestep.graph import ranks, segments
from fusestep.graph.baked import Baked
from fusestep.graph.batch import Batch
from fusestep.graph.capture import Capture, attempt
from fusestep.graph.checks import check_built, check_trains, has_gradient
from fusestep.graph.rates import Rates
from fusestep.graph.shapes import Shape, Shapes
from fusestep.graph.watch import HostState, waits
from fusestep.nn.fp8_module import FP8Module
from fusestep.ops import settled_slots
from fusestep.optim.base import FusedOptimizer

logger = logging.getLogger("fusestep")

#: Steps that run one launch at a time before a shape's first capture, and before one after something had changed.
WARM_UP, WARM_UP_AGAIN = 3, 1

#: Where graphs were dropped after fewer replays than these, so many times in a row, for something that had changed, so
#: many steps run one launch at a time before the next try.
FEWEST_REPLAYS, MOST_DROPS, REST = 3, 3, 50

#: Optimizers whose last step was captured. They keep the tables of their last step for a graph, so that each capture
#: follows a step outside of any, whoever's it was.
_captured: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class TrainStep:
    """One step of training as one CUDA graph.

        step = TrainStep(model, lambda model, x, y: F.cross_entropy(model(x), y), optimizer)
        for x, y in batches:
            loss = step(x, y)

    A call takes a whole step: forward, backward, the optimizer's step (unscaling, clipping and skipping with it) and
    zero_grad. It gives the losses and weights of the same calls made one by one; with
    torch.use_deterministic_algorithms(True) to the bit. Random numbers (dropout) go on from step to step.

    Args:
        model: lies on one device. Where several ranks train it together, DistributedDataParallel(model), or a model
            that fully_shard or parallelize_module has changed; each rank then has a TrainStep, with its own part of
            each batch, and the loss is of that part.
            Attributes of its modules that are plain values, such as a dropout's p, are part of the graph and are
            compared; those of other kinds, such as a list, are not: after changing one call `reset()`.
        loss_fn: called as loss_fn(model, *batch, **named); returns the loss, one element, of which the gradient is
            taken. It must not look at values (`.item()`, `print(loss)`, an `if` on a tensor): that makes the host
            wait, which no graph can hold. In replays no Python runs, neither it nor hooks. Numbers, tensors and
            modules that it reads from outside, such as a loss's weight in a closure or in a trainer, are compared too
            (reach.py says how far): a change is a new capture.
        optimizer: one of fusestep.optim (made `capturable` if it is not), or any whose step does not wait for the
            device: torch.optim.AdamW(capturable=True) and the like. Its gradients and the model's are None after a
            call.
        autocast: the dtype of torch.autocast around loss_fn, None for none.
        fp8_recipe: of fusestep.fp8.fp8_autocast around loss_fn, None for none. loss_fn may have regions of its own.
        scaler: a torch.amp.GradScaler. One that is enabled needs an optimizer which unscales by itself, as
            those of fusestep.optim do.
        accumulate: micro-batches a step. The tensors of a batch are cut along dimension 0 into as many parts (those
            without dimensions go to each), the loss is the mean of theirs.
        before: called first in each step, as part of the graph, for example to write a learning rate that follows
            `optimizer.applied_steps` on the device.
        max_graphs: batch shapes whose graphs are kept; the one that was not used for longest makes room.
        capture: False runs every step one launch at a time, which is useful to compare with.

    Attributes:
        captures: what each capture cost, in their order.
        fallback: why steps run one launch at a time, or None.

    Raises: UserError for options out of range or of another kind, models on several devices, optimizers that need a
        closure.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        autocast: torch.dtype | None = None,
        fp8_recipe: Recipe | None = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        before: Callable[[], object] | None = None,
        max_graphs: int = 8,
        capture: bool = True,
    ) -> None:
        for name, number in (("accumulate", accumulate), ("max_graphs", max_graphs)):
            if not isinstance(number, int) or number < 1:
                raise UserError(f"TrainStep: {name} is {number!r}; pass a whole number of at least 1.")
        check_built(
            model,
            loss_fn,
            optimizer,
            autocast=autocast,
            fp8_recipe=fp8_recipe,
            scaler=scaler,
            before=before,
        )
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.autocast = autocast
        self.fp8_recipe = fp8_recipe
        self.scaler = scaler
        self.accumulate = accumulate
        self.before = before
        self.max_graphs = max_graphs
        self.captures: list[Capture] = []
        self.fallback: str | None = None
        self.device = _device_of(model)
        self._shapes = Shapes(WARM_UP, WARM_UP_AGAIN)
        self._baked, self._rates = Baked(self), Rates(self.device)
        self._replays = 0  # of the graphs there are
        self._drops = 0  # of graphs that hardly replayed, in a row
        self._rest = 0  # steps until the next try
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._optimizer_stream: torch.cuda.Stream | None = None
        self._is_aside = False
        self._has_trained = False  # a parameter of the optimizer once got a gradient
        self._is_wanted = capture
        if capture:
            self._prepare()

    def __call__(self, /, *batch: Any, **named: Any) -> Tensor:
        """Take a step.

        Args:
            batch, named: what loss_fn takes after the model, by position and by name: tensors, also in dicts, lists
                and tuples. They may lie on the host (pinned ones are copied without waiting) or on the model's device;
                anything else must be hashable and is part of the graph.
        Returns: the loss, 0-d, on the model's device, without a gradient.
        Raises: UserError for a loss of several elements or without a gradient, batches that cannot be cut into
            micro-batches or come with a history, gradients that are there already, inference mode, and an
            optimizer none of whose parameters gets a gradient. Where loss_fn raises nothing is stepped, and no
            gradient stays.
        """
        given = Batch(batch, named)
        self._check_gradients()
        if self._rest > 0:
            self._rest -= 1
            self.fallback = self.fallback if self._rest > 0 else None
            _captured.discard(self.optimizer)
            return self._eager(given.on(self.device))
        if self._runs_without():
            return self._eager(given.on(self.device))
        if (unfit := given.unfit()) is not None:
            self._fall_back(unfit)
            return self._eager(given.on(self.device))
        self._rates.keep(self.optimizer)
        what = self._baked.has_changed()
        if what is not None:
            self._capture_anew(what)
        if self._runs_without():
            return self._eager(given.on(self.device))
        shape = self._shapes.of(given, self.model, self.max_graphs)
        is_due = shape.graph is None and self.optimizer in _captured
        if shape.warm_up > 0 or is_due or self._has_stale_copies():
            _captured.discard(self.optimizer)
            is_last = shape.warm_up <= 1 and shape.graph is None
            loss = (self._watched if is_last else self._aside)(given.on(self.device))
            shape.warm_up = max(shape.warm_up - 1, 0)
            return loss
        if shape.graph is None and not self._capture(shape, given.on(self.device)):
            return self._eager(given.on(self.device))
        with torch.no_grad():  # loss_fn may have them require gradients
            for static, part in zip(shape.inputs, given.tensors, strict=True):
                static.copy_(part, non_blocking=True)
        assert shape.graph is not None
        assert shape.loss is not None
        shape.graph.replay()
        self._replays += 1
        torch.clear_autocast_cache()
        return shape.loss.clone()

    def reset(self) -> None:
        """Drop the graphs and their memory; the next calls warm up and capture anew."""
        self._shapes.clear()
        self._baked.forget()
        self._pool = None

    # One step

    def _check_gradients(self) -> None:
        if torch.is_inference_mode_enabled():  # which enable_grad does not end
            raise UserError("TrainStep: within torch.inference_mode() nothing has a gradient; call the step outside.")
        if any(has_gradient(group["params"]) for group in self.optimizer.param_groups):
            raise UserError(
                "TrainStep: parameters of the optimizer have gradients from before, to which a step does not add; call "
                "optimizer.zero_grad() first."
            )

    def _eager(self, batch: Batch) -> Tensor:
        # Within a region of torch.autocast that is the caller's, casts of weights would stay as they are for all steps.
        torch.clear_autocast_cache()
        try:
            return self._step(batch)
        finally:
            torch.clear_autocast_cache()
            # Also where loss_fn raised: the next step must not add to what is half a gradient.
            self.optimizer.zero_grad()
            self.model.zero_grad()  # and what the optimizer does not have; nor do all optimizers write None

    def _step(self, batch: Batch) -> Tensor:
        if self.before is not None:
            self.before()
        total: Tensor | None = None
        with torch.enable_grad(), ExitStack() as regions:
            if self.fp8_recipe is not None:  # one region a step, so that micro-batches share their scales
                regions.enter_context(fp8_autocast(recipe=self.fp8_recipe))
            for number, part in enumerate(batch.parts(self.accumulate), 1):
                with ranks.micro_batch(self.model, is_last=number == self.accumulate):
                    loss = self._backward(part)
                total = loss.detach() if total is None else total + loss.detach()
        if not self._has_trained:
            check_trains(self.optimizer)
            self._has_trained = True
        if any(isinstance(module, FP8Module) and module.fp8_state is not None for module in self.model.modules()):
            # What the step recorded enters the histories before the optimizer casts the new weights with the scales.
            with fp8_autocast(recipe=self.fp8_recipe):
                pass
        with self._apart() if self._is_aside else nullcontext():
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        assert total is not None
        return total

    def _backward(self, part: Batch) -> Tensor:
        """The loss of one micro-batch, as it counts in the step's, after its backward pass."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = part.loss(self.loss_fn, self.model)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise UserError(f"TrainStep: loss_fn returned a value of {got}; return a tensor of one element.")
        if not loss.requires_grad:
            raise UserError(
                "TrainStep: loss_fn returned a loss without a gradient, since nothing that it depends on is trained or "
                "something on its way was detached; train a parameter that it depends on."
            )
        loss = loss.reshape(()) if self.accumulate == 1 else loss.reshape(()) / self.accumulate
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    # Graphs

    def _prepare(self) -> None:
        """Find out at once what would be found out late."""
        reason: str | None = None
        if self.device.type != "cuda":
            reason = f"CUDA graphs run on CUDA devices, the model is on {self.device.type}"
        elif not hardware.cuda_support().ok:
            reason = hardware.cuda_support().reason
        elif (why := ranks.obstacle(self.model)) is not None:
            reason = why
        else:
            reason = self._prepare_optimizer()
        if reason is not None:
            self._fall_back(reason)
            return
        self._stream, self._optimizer_stream = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def _prepare_optimizer(self) -> str | None:
        """Have the optimizer keep on the device what a graph reads; or say why it cannot."""
        optimizer = self.optimizer
        if isinstance(optimizer, FusedOptimizer):
            optimizer.capturable = True
            for group in (optimizer.defaults, *optimizer.param_groups):
                group["capturable"] = True
        elif not all(group.get("capturable", True) for group in optimizer.param_groups):
            return f"{type(optimizer).__name__} was built with capturable=False; pass capturable=True"
        self._rates.keep(optimizer)
        return None

    def _fall_back(self, reason: str) -> None:
        """Run one launch at a time from now on, or for the steps of a rest."""
        self.reset()
        self.fallback = reason
        dispatch.announce_fallback(
            "TrainStep", "runs one launch at a time", reason, "cannot capture the step", "to run one launch at a time"
        )

    def _aside(self, batch: Batch) -> Tensor:
        """A step on the stream that will capture, as torch asks of the steps before."""
        assert self._stream is not None
        segments.release()
        self._is_aside = True
        try:
            with segments.apart(self._stream, self.device), self._baked.running():
                loss = self._eager(batch)
        finally:
            self._is_aside = False
        loss.record_stream(torch.cuda.current_stream(self.device))
        for tensor in batch.tensors:
            tensor.record_stream(self._stream)
        return loss

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Around the optimizer's step outside of graphs: what it makes lies in segments of its own."""
        assert self._optimizer_stream is not None
        segments.release()
        with segments.apart(self._optimizer_stream, self.device):
            yield

    def _watched(self, batch: Batch) -> Tensor:
        """The last step before a capture: what no graph can hold is found before the capture would fail on it.

        A capture that fails leaves torch's random numbers in a state that they have to be brought out of.
        """
        self._baked.watch_slots()
        host = HostState(self._baked.modules(), self.optimizer, self.device, self._baked.numbers_outside)
        with waits() as found:
            loss = self._aside(batch)
        if found:
            self._fall_back(
                f"{found[0]} makes the host wait for the device, which no graph can hold; keep loss_fn and the "
                "optimizer from looking at values (.item(), .cpu(), an if on a tensor), or pass capture=False"
            )
        elif (kept := host.changed()) is not None:
            self._fall_back(kept)
        elif not self._runs_without():
            self._baked.remember()
        return loss

    def _capture(self, shape: Shape, batch: Batch) -> bool:
        """Capture a step of this kind of batch; False, announced, where that cannot be done."""
        segments.release()
        before, reserved = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        copies, settled = self._baked.current_copies(), self._baked.settled_slots()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        place = self.device, self._pool, self._stream
        try:
            with settled_slots.settled(settled), self._baked.running():
                taken = attempt(self._eager, batch, self.model, self._baked.modules(), self.optimizer, *place)
        except BaseException:
            self._pool = None  # graphs that there are keep theirs
            raise
        if isinstance(taken, str):
            self._fall_back(taken)
            return False
        _captured.add(self.optimizer)
        self._baked.rely_on(copies, settled, is_first=not self._shapes.have_graphs())
        shape.inputs, shape.graph, shape.loss = taken
        grown = torch.cuda.memory_reserved(self.device) - reserved
        cost = Capture(tuple(tuple(one.shape) for one in shape.inputs), time.perf_counter() - before, max(grown, 0))
        self.captures.append(cost)
        logger.info(
            "TrainStep captured a step of batch %s in %.2f s; its memory is %.0f MB",
            " and ".join(str(one) for one in cost.batch),
            cost.seconds,
            cost.memory / 1e6,
        )
        return True

    # What a graph has baked in

    def _runs_without(self) -> bool:
        """Whether steps run one launch at a time for good, or for a rest."""
        return not self._is_wanted or self.fallback is not None

    def _capture_anew(self, what: str) -> None:
        """Something changed that graphs hold, `what` in words: drop them, and rest where it keeps changing."""
        self._drops = self._drops + 1 if self._replays < FEWEST_REPLAYS else 0
        self._replays = 0
        if (reason := self._prepare_optimizer()) is not None:
            self._fall_back(reason)
            return
        logger.info("TrainStep: %s changed, so the step is captured anew", what)
        self._shapes.drop_graphs()
        self._baked.forget()
        self._pool = None
        if self._drops >= MOST_DROPS:
            self._rest = REST
            self._fall_back(
                f"{what} keeps changing, which a graph would keep as it was; leave it alone (a schedule that moves "
                "betas takes cycle_momentum=False), keep it in a tensor on the device that is written in place, or put "
                "it into the batch as a tensor"
            )

    def _has_stale_copies(self) -> bool:
        """Whether weights that a graph reads as copies, in FP8 or in 16 bits, are not what the copies are of.

        A step outside the graph casts such weights, and its optimizer writes the copies anew in the same memory; frozen
        ones it would never write.
        """
        stale = self._baked.stale_copies()
        if not all(parameter.requires_grad for parameter in stale):
            self._capture_anew("a frozen weight")
        return bool(stale)


def _device_of(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UserError(f"TrainStep: the model's parameters lie on {names}; move it to one device.")
    return devices.pop() if devices else torch.device("cpu")
