"""The graphs that Inductor gets of a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule


def inductors_graphs(module: nn.Module, input: Tensor) -> list[GraphModule]:
    """That of inference, or, where the input requires a gradient, those of forward and backward.

    Module and input may be fake.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import select_decomp_table

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: object) -> GraphModule:
        graphs.append(graph)
        return graph

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    compiled = aot_function(
        lambda values, input: torch.func.functional_call(
            module, dict(zip(state, values, strict=True)), (input,)
        ),
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with torch.set_grad_enabled(input.requires_grad):
        output = compiled(list(state.values()), input)
        if input.requires_grad:
            output.sum().backward()
    return graphs
