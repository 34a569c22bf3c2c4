"""DeepSpeed has no hook interface: this wraps its communication backend while an engine reduces.

All of DeepSpeed's collectives go through one object, ``deepspeed.comm.comm.cdb``. A stand-in for it
recognises the calls that carry an engine's gradients and gives them to the engine's hook. A call
counts as such when the engine is reducing (in its own backward pass, or in one of the methods that
flush gradients), and it sums floating-point numbers over the engine's data-parallel ranks.

The proof that nothing goes another way: parameters report when they get a gradient, and after each
reduction the elements seen must be those of the parameters that reported.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from disco_ds.comm_hooks.base import CommHook, Kind, Reduction, Undo
from disco_ds.comm_hooks.deepspeed_rules import check_engine
from disco_ds.comm_hooks.torch_native import reduce_scatter

_ATTRIBUTE = "_disco_comm_hook"


class UnhookedGradients(RuntimeError):
    """Gradients were reduced by a way that the hook did not see."""


def register_deepspeed(engine: Any, hook: CommHook) -> Undo:
    """Route the gradient reductions of ``engine`` through ``hook``.

    Raises:
        ValueError: the engine has a hook, or reduces in a way that hooks cannot serve.
    """
    if _ATTRIBUTE in vars(engine):
        raise ValueError(
            "this engine has a communication hook: remove it first, or register "
            "compose(first, second)"
        )
    check_engine(engine)
    undo = ExitStack()
    hooked = HookedEngine(engine, hook, HookedBackend.install(undo))
    hooked.attach(undo)
    return undo.close


class HookedBackend:
    """Stands in for DeepSpeed's backend object; everything but gradient reductions passes."""

    def __init__(self, inner: Any) -> None:
        own: dict[str, Any] = {"inner": inner, "windows": [], "tasks": {}, "users": 0}
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    @classmethod
    def install(cls, undo: ExitStack) -> HookedBackend:
        """The wrapper of this process; the last of its users takes it away again."""
        from deepspeed.comm import comm

        if comm.cdb is None:
            raise ValueError("DeepSpeed's communication is not initialised: make the engine first")
        if not isinstance(comm.cdb, cls):
            comm.cdb = cls(comm.cdb)
        backend: HookedBackend = comm.cdb
        vars(backend)["users"] += 1

        def uninstall() -> None:
            vars(backend)["users"] -= 1
            if backend.users == 0 and comm.cdb is backend:
                comm.cdb = backend.inner

        undo.callback(uninstall)
        return backend

    def _live(self) -> HookedEngine | None:
        """The engine that is reducing now: by an open window, or by the running backward pass."""
        if self.windows:
            engine: HookedEngine = self.windows[-1]
            return engine
        found: HookedEngine | None = self.tasks.get(torch._C._current_graph_task_id())
        return found

    def _owner(self, tensor: Tensor, op: Any, group: Any, async_op: bool) -> HookedEngine | None:
        engine = self._live()
        is_sum = str(op).rpartition(".")[2] == "SUM"
        if engine is None or async_op or not is_sum:
            return None
        if not tensor.is_floating_point() or tensor.numel() < 2 or ranks_of(group) != engine.ranks:
            return None
        return engine

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """As the backend's."""
        engine = self._owner(tensor, op, group, async_op)
        if engine is None:
            return self.inner.all_reduce(tensor, op, group, async_op)

        def transport(stand_in: Tensor) -> None:
            self.inner.all_reduce(stand_in, op, group, False)
            if stand_in is not tensor:
                tensor.copy_(stand_in)

        return engine.reduce("all_reduce", tensor, transport)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """As the backend's."""
        engine = self._owner(tensor, op, group, async_op)
        if engine is None:
            return self.inner.reduce(tensor=tensor, dst=dst, op=op, group=group, async_op=async_op)

        def transport(stand_in: Tensor) -> None:
            self.inner.reduce(tensor=stand_in, dst=dst, op=op, group=group, async_op=False)
            if stand_in is not tensor:
                tensor.copy_(stand_in)

        return engine.reduce("reduce", tensor, transport)

    def reduce_scatter_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """As the backend's."""
        engine = self._owner(input_tensor, op, group, async_op)
        if engine is None:
            return self.inner.reduce_scatter_tensor(
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                op=op,
                group=group,
                async_op=async_op,
            )

        def transport(stand_in: Tensor) -> None:
            if stand_in.dtype == output_tensor.dtype:
                reduce_scatter(output_tensor, stand_in, group=group)
                return
            output = torch.empty_like(output_tensor, dtype=stand_in.dtype)
            reduce_scatter(output, stand_in, group=group)
            output_tensor.copy_(output)

        return engine.reduce("reduce_scatter", input_tensor, transport)


class HookedEngine:
    """One engine, its hook, and the account of gradients produced and gradients seen."""

    def __init__(self, engine: Any, hook: CommHook, backend: HookedBackend) -> None:
        self.engine, self.hook, self.backend = engine, hook, backend
        self.ranks = ranks_of(engine.seq_data_parallel_group)
        self.produced: dict[int, int] = {}
        self.seen: Counter[Kind] = Counter()
        self._calls = 0

    def attach(self, undo: ExitStack) -> None:
        """Wrap the methods of this one engine and listen to its parameters."""
        vars(self.engine)[_ATTRIBUTE] = self
        undo.callback(vars(self.engine).pop, _ATTRIBUTE)
        for number, parameter in enumerate(self._trainable()):
            handle = parameter.register_post_accumulate_grad_hook(self._on_gradient(number))
            undo.callback(handle.remove)
        self._wrap(undo, "forward", self._forward)
        self._wrap(undo, "allreduce_gradients", self._allreduce_gradients)
        self._wrap(undo, "coalesce_grad_reduction", self._coalesce_grad_reduction)
        self._wrap(undo, "step", self._step)

    def _wrap(self, undo: ExitStack, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a method on the instance; ``wrapper`` gets the original first."""
        original = getattr(self.engine, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        vars(self.engine)[name] = method
        undo.callback(vars(self.engine).pop, name)

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def _on_gradient(self, number: int) -> Callable[[Tensor], None]:
        def report(parameter: Tensor) -> None:
            self.produced[number] = _full_size(parameter)

        return report

    def reduce(self, kind: Kind, tensor: Tensor, transport: Callable[[Tensor], None]) -> None:
        """One recognised reduction."""
        self.seen[kind] += tensor.numel()
        self._calls += 1
        self.hook.reduce(Reduction(kind, tensor, self._calls, transport))

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Recognise the backward pass by the first gradient that reaches an output."""
        output = original(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_gradient)
        return output

    def _on_output_gradient(self, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        known = self.backend.tasks.get(task)
        if known is self:
            return
        if known is not None:
            raise ValueError("one backward pass through two hooked engines is not supported")
        self._forget_failed_passes()
        self.backend.tasks[task] = self
        # After DeepSpeed's own callback, which may reduce what is left.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.backend.tasks.pop(task, None))

    def _forget_failed_passes(self) -> None:
        """Passes that raised never reached their callback; numbers of passes are unique."""
        failed = [task for task, engine in self.backend.tasks.items() if engine is self]
        for task in failed:
            del self.backend.tasks[task]
        if failed:
            self._close_account()

    @contextlib.contextmanager
    def _window(self) -> Iterator[None]:
        self.backend.windows.append(self)
        try:
            yield
        finally:
            self.backend.windows.remove(self)

    def _allreduce_gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's last word on a backward pass: reduces what is left, or at stage 0/1 all."""
        with self._window():
            result = original(*args, **kwargs)
        self._account()
        return result

    @contextlib.contextmanager
    def _coalesce_grad_reduction(self, original: Callable[..., Any]) -> Iterator[None]:
        block = original()
        block.__enter__()
        try:
            yield
        except BaseException as error:
            # Its flush runs all the same, as on ranks that did not fail.
            try:
                with self._window():
                    block.__exit__(type(error), error, error.__traceback__)
            finally:
                self._close_account()
            raise
        with self._window():
            block.__exit__(None, None, None)
        self._account()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_boundary = self.engine.is_gradient_accumulation_boundary()
        result = original(*args, **kwargs)
        if is_boundary and self.produced:
            raise UnhookedGradients(_complaint(0, sum(self.produced.values())))
        return result

    def _account(self) -> None:
        """After a reduction: what was seen is what was produced. Not after a mere accumulation."""
        seen, produced = sum(self.seen.values()), list(self.produced.values())
        if not seen:
            return
        if self.engine.zero_optimization_stage() == 0:
            produced = [_full_size(p) for p in self._trainable()]  # zeros for those without
        lowest, highest = sum(produced), sum(produced)
        if self.seen["reduce_scatter"]:  # pads every parameter to a multiple of the ranks
            world_size = len(self.ranks)
            highest = sum(-(-size // world_size) * world_size for size in produced)
            if seen == self.seen["reduce_scatter"]:
                lowest = highest
        self._close_account()
        if not lowest <= seen <= highest:
            raise UnhookedGradients(_complaint(seen, lowest))

    def _close_account(self) -> None:
        self.seen.clear()
        self.produced.clear()
        self._calls = 0


def _complaint(seen: int, expected: int) -> str:
    from deepspeed import __version__

    return (
        f"the communication hook saw {seen} of {expected} gradient elements: deepspeed "
        f"{__version__} reduced the others another way. Train without the hook, or with a "
        "DeepSpeed release that disco_ds is tested with"
    )


def _full_size(parameter: Any) -> int:
    """Elements of a parameter, whole even where stage 3 keeps a part."""
    size: int = getattr(parameter, "ds_numel", None) or parameter.numel()
    return size


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of a group: DeepSpeed has several group objects for the same ranks."""
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
