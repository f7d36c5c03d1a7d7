"""Compiling with the passes that Inductor runs on joint graphs, and without its code generation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from rope_compile.ops import rope_op

__all__ = ["SLOTS", "Compiled", "count_ops"]

SLOTS = ("joint_custom_pre_pass", "joint_custom_post_pass")


class Compiled:
    """A function compiled by AOTAutograd with the passes that Inductor would run, and its graphs.

    Inductor's own code generation takes seconds a graph and adds nothing here.
    """

    def __init__(self, function: Callable[..., object], fullgraph: bool = True) -> None:
        self.graphs: list[fx.GraphModule] = []
        backend = aot_autograd(
            fw_compiler=self._keep,
            bw_compiler=self._keep,
            inference_compiler=lambda graph, inputs: self._keep(self._passed(graph), inputs),
            partition_fn=lambda graph, inputs, **more: min_cut_rematerialization_partition(
                self._passed(graph), inputs, **more
            ),
            decompositions=select_decomp_table(),
        )
        self._function = torch.compile(function, backend=backend, fullgraph=fullgraph)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*args, **kwargs)

    def _keep(self, graph: fx.GraphModule, inputs: object) -> object:
        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    def _passed(self, graph: fx.GraphModule) -> fx.GraphModule:
        for slot in SLOTS:
            if getattr(inductor_config, slot):
                getattr(inductor_config, slot)(graph.graph)
        graph.recompile()
        return graph

    @property
    def counts(self) -> list[int]:
        """Operators of ours in each graph, forward before backward."""
        return [count_ops(graph.graph) for graph in self.graphs]


def count_ops(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=rope_op))
