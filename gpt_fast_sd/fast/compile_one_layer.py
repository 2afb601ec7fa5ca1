"""A step over L equal layers, compiled for one of them: the part before the layers, one layer, the part after.

Dynamo traces the step over a model of the first layer alone. The graph is cut in three at the bounds of that layer, the
parts are compiled separately, and the middle one runs L times, each time with the weights and the cache of another
layer. So a model with more layers takes no longer to compile, and Dynamo's guards look at one layer only.

Where a layer begins with the norm that also follows the last one, as a Llama's does, both cuts lie behind it: the
middle part ends with the norm of the next layer, so that Inductor makes one kernel of it and of the residual sum.

Shapes: L layers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gpt_fast_sd.model import Block, CacheLayer, Transformer

Layer = tuple[Tensor, ...]  # one layer's own tensors: its weights and buffers, then its entry of each list
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class LayeredModel:
    """A model as one layer and the tensors of each layer."""

    def __init__(self, model: Transformer) -> None:
        """ValueError if layers differ in more than values."""
        self.model, self.first = model, model.first_layers(1)
        self.own = [(*layer.parameters(), *layer.buffers()) for layer in model.layers]
        kinds = [[(x.shape, x.dtype, x.stride(), x.device) for x in own] for own in self.own]
        other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:  # code compiled for the first layer would misread its weights
            raise ValueError(
                f"layer {other} differs from the first one in the shapes, dtypes, strides or device of its weights: "
                "steps are compiled for one"
            )

    def is_of(self, model: Transformer) -> bool:
        """Whether this still describes the model: its weights may have been replaced."""
        return self.model is model and all(map(operator.is_, model.layers[0].parameters(), self.own[0]))

    def split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Layer]]:
        """A step's arguments -> those of the same step over one layer, and each layer's own tensors.

        Every list among the arguments, including tuples in it, must hold one tensor per layer, or the cache's layers.
        Where these differ in their windows no layer stands for all: the arguments as they are, and none.
        """
        lists: list[Sequence[Tensor]] = []
        windows = set[int]()

        def first(argument: Any) -> Any:
            if argument is self.model:
                return self.first
            if isinstance(argument, tuple):
                return tuple(map(first, argument))
            if isinstance(argument, list):
                cached = isinstance(argument[0], CacheLayer)
                windows.update(layer.window for layer in argument if cached)
                lists.extend(zip(*(layer.buffers for layer in argument), strict=True) if cached else [argument])
                return argument[:1]
            return argument

        firsts = [first(argument) for argument in arguments]
        if len(windows) > 1:
            return list(arguments), []
        return firsts, [(*own, *entries) for own, *entries in zip(self.own, *lists, strict=True)]


@dataclass(frozen=True)
class Part:
    """A compiled part of a graph; its inputs and outputs by the names that the nodes have in the graph."""

    run: Callable[..., Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ByLayer:
    """The traced graph of a step over one layer; called with that graph's inputs, it returns the result of L layers."""

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], layers: Sequence[Layer], compile_: Compiler
    ) -> None:
        """graph: Dynamo's, with its inputs; layers: each layer's own tensors, the first one's are among the inputs."""
        self._graph, self._compile, n_layers = graph, compile_, len(layers)
        nodes = list(graph.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._names = [node.name for node in placeholders]
        place = {id(tensor): i for i, tensor in enumerate(layers[0])}
        pairs = list(zip(placeholders, inputs, strict=True))
        self._own = {node.name: place[id(value)] for node, value in pairs if id(value) in place}
        # A size of a tensor must also be an input of its part; and with it a buffer, read or not: Inductor keeps the
        # range of a size with the code that it has built, and looks that up by the shapes of inputs, which distinguish
        # caches of different capacities.
        self._sizes = [node for node in placeholders if isinstance(node.meta["example_value"], torch.SymInt)]
        self._sizes += [n for n, x in pairs if id(x) in place and not isinstance(x, torch.nn.Parameter) and x.dim()][:1]

        output, within = nodes[-1], [node for node in nodes if node.op != "placeholder" and _in_a_layer(node)]
        assert output.op == "output" and within, "a step over layers has a layer"
        # a layer begins by reading its input, and ends with the input of the next one
        handed_on = [(within[0].all_input_nodes[0], within[-1])]
        begin, end, weights_of = _norms(nodes, within, self._own)
        if begin:
            within, handed_on = [*within[len(begin) :], *end], [*handed_on, (begin[-1], end[-1])]
        # the weights of the norm at the end: of the next layer, there by place among its own
        self._next = [(last.name, self._own[first.name]) for first, last in weights_of.items()]
        behind = set(within)  # and everything that depends on a layer
        for node in nodes:
            if any(source in behind for source in node.all_input_nodes):
                behind.add(node)
        alive = _alive(nodes)
        inside = set(within)
        outside = [n for n in nodes if n in alive and n not in inside and n.op not in ("placeholder", "output")]
        before, after = [n for n in outside if n not in behind], [n for n in outside if n in behind]

        assert all(_alike(*pair) for pair in handed_on), f"a layer is given and gives {handed_on}"
        self._handed_on = [(given.name, taken.name) for given, taken in handed_on]
        wanted, gives = _read_elsewhere(within, alive), [taken for _, taken in handed_on]
        beside = [node for node in wanted if node not in gives]  # other results of each layer, collected in lists
        self._beside = [node.name for node in beside]
        self._before = self._part(before, _read_elsewhere(before, alive | set(within)))
        weights = {node.name for node, value in pairs if isinstance(value, torch.nn.Parameter)}
        weights -= {*self._own, *(name for name, _ in self._next)}
        strange = [n.name for node in within for n in node.all_input_nodes if n.name in weights]
        assert not strange, f"weights that are none of this layer's: {strange}"
        # if nothing reads the output of the last layer, that layer computes only its other results
        read = any(taken in wanted for taken in gives)
        self._layer = self._part(within, [*beside, *gives]) if n_layers > 1 or read else None
        self._last = self._layer if read else self._part(within, beside)
        many = {node: [f"{node.name}@{i}" for i in range(n_layers)] for node in beside}
        self._after = self._part(after, _read_elsewhere(after, alive), many)
        self._results = [node.name if isinstance(node, fx.Node) else None for node in output.args[0]]
        del self._graph, self._compile  # they hold the step, and the tensors it was traced with

    def __call__(self, layers: Sequence[Layer], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run the step: the graph's inputs, and each layer's own tensors -> the graph's outputs."""
        known = dict(zip(self._names, inputs, strict=True))
        behind = {name: known[name] for name, _ in self._next}
        if self._before:
            known.update(zip(self._before.outputs, _call(self._before, known), strict=True))
        for i, layer in enumerate(layers):
            part = self._last if i == len(layers) - 1 else self._layer
            for name, j in self._own.items():
                known[name] = layer[j]
            for name, j in self._next:
                known[name] = layers[i + 1][j] if i + 1 < len(layers) else behind[name]
            assert part
            outputs = dict(zip(part.outputs, _call(part, known), strict=True))
            for name in self._beside:
                known[f"{name}@{i}"] = outputs[name]
            for given, taken in self._handed_on:
                known[given] = known[taken] = outputs.get(taken)
        known.update(zip(self._names, inputs, strict=True))  # a weight of the last norm may be a layer's, too
        if self._after:
            known.update(zip(self._after.outputs, _call(self._after, known), strict=True))
        return tuple(known[name] if name is not None else None for name in self._results)

    def _part(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], many: dict[fx.Node, list[str]] | None = None
    ) -> Part | None:
        """Compile these nodes as a function of their inputs; many: nodes that stand for L nodes in their lists."""
        if not nodes:
            return None
        many, part, inputs = many or {}, fx.Graph(), list[str]()
        env: dict[fx.Node, fx.Node | list[fx.Node]] = {}
        examples: list[Any] = []

        def placeholder(source: fx.Node, name: str) -> fx.Node:
            node = part.placeholder(name.replace("@", "_of_layer_"))
            node.meta = dict(source.meta)
            inputs.append(name)
            examples.append(source.meta["example_value"])
            return node

        read = [source for node in nodes for source in node.all_input_nodes]
        if any(_has_size(source) for source in read if source not in nodes):
            read = [*self._sizes, *read]
        for source in dict.fromkeys(read):
            if source not in nodes and source.op != "get_attr":
                names = many.get(source)
                env[source] = (
                    [placeholder(source, name) for name in names] if names else placeholder(source, source.name)
                )

        def copied(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if argument.op == "get_attr" and argument not in env:
                    env[argument] = part.node_copy(argument)
                return env[argument]
            if isinstance(argument, (list, tuple)):
                items: list[Any] = []
                for item in argument:
                    new = copied(item)
                    items.extend(new if item in many else [new]) if isinstance(item, fx.Node) else items.append(new)
                return tuple(items) if isinstance(argument, tuple) else items
            if isinstance(argument, dict):
                return {key: copied(value) for key, value in argument.items()}
            if isinstance(argument, slice):
                return slice(copied(argument.start), copied(argument.stop), copied(argument.step))
            return argument

        for node in nodes:
            if node.op == "get_attr":
                copied(node)
                continue
            new = part.create_node(node.op, node.target, copied(node.args), copied(node.kwargs), node.name, node.type)
            new.meta = dict(node.meta)
            env[node] = new
        part.output(tuple(env[node] for node in outputs))
        run = self._compile(fx.GraphModule(self._graph, part), examples)
        return Part(run, tuple(inputs), tuple(node.name for node in outputs))


def _call(part: Part, known: dict[str, Any]) -> Sequence[Any]:
    return part.run(*[known[name] for name in part.inputs])


def _in_a_layer(node: fx.Node) -> bool:
    """Whether a node was traced inside a Block; the node's module stack has its class, as such or by name."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return any(kind is Block or str(kind).rpartition(".")[2] == Block.__name__ for _, kind in stack)


def _norms(
    nodes: Sequence[fx.Node], layer: Sequence[fx.Node], own: dict[str, int]
) -> tuple[list[fx.Node], list[fx.Node], dict[fx.Node, fx.Node]]:
    """The module at a layer's beginning and what follows the layer, and the weights of both; nothing if they differ."""
    begin = list(itertools.takewhile(lambda node: _module(node) == _module(layer[0]), layer))
    at = nodes.index(layer[-1]) + 1
    end = list(nodes[at : at + len(begin)])
    same = {layer[0].all_input_nodes[0]: layer[-1]}
    weights: dict[fx.Node, fx.Node] = {}
    if len(begin) == len(layer) or len(begin) != len(end):
        return [], [], {}
    for first, last in zip(begin, end, strict=True):
        for a, b in zip(first.all_input_nodes, last.all_input_nodes, strict=False):
            if a not in same and a.name in own and b.op == "placeholder" and _alike(a, b):
                same[a] = weights[a] = b
        mapped = fx.map_arg((first.args, first.kwargs), lambda node: same.get(node, node))
        if (first.op, first.target, mapped) != (last.op, last.target, (last.args, last.kwargs)):
            return [], [], {}
        same[first] = last
    # what is handed on must be all that the rest of the layer reads of it, and the weights handed in nobody else's
    apart = {*begin[:-1], *weights.values()}
    if any(source in apart for node in layer[len(begin) :] for source in node.all_input_nodes):
        return [], [], {}
    return begin, end, weights


def _module(node: fx.Node) -> str:
    """The path of the innermost module that a node was traced in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _has_size(node: fx.Node) -> bool:
    """Whether the result of a node is a size that may vary, or has such a size."""
    value = node.meta.get("example_value")
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes return tensors of one shape, dtype and memory order."""
    x, y = a.meta.get("example_value"), b.meta.get("example_value")
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype):
        return False
    # the stride of a size of 1 does not matter
    return all(n == 1 or i == j for n, i, j in zip(x.shape, x.stride(), y.stride(), strict=True))


def _alive(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that the output, or anything that is written to, depends on."""
    alive: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or _writes(node) or any(user in alive for user in node.users):
            alive.add(node)
    return alive


def _read_elsewhere(nodes: Sequence[fx.Node], alive: set[fx.Node]) -> list[fx.Node]:
    """Those of the nodes that are read by others that matter."""
    own = set(nodes)
    return [node for node in nodes if any(user in alive and user not in own for user in node.users)]


def _writes(node: fx.Node) -> bool:
    """Whether a node changes something that it does not return."""
    schema = getattr(getattr(node.target, "default", node.target), "_schema", None)
    name = getattr(node.target, "__name__", str(node.target))
    return (schema is not None and schema.is_mutable) or name == "setitem" or (name[-1] == "_" and name[-2:] != "__")
